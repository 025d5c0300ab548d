"""Text -> exact token ids through the target's own tokenizer and chat template.

What a row trains on is what the engine was given and gave back: prompt ids + output ids, never a
second tokenization of the joined text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

from paceline.data.prompt import Prompt
from paceline.endpoint import Request, Sampling
from paceline.errors import DataError, MissingExtraError
from paceline.problems import show_text
from paceline.target import TargetFacts

__all__ = [
    "ChatTokenizer",
    "Thinking",
    "build_requests",
    "open_decoder",
    "open_tokenizer",
    "plain_thinking",
]

Thinking = Literal["none", "on", "off"]
_OPEN, _CLOSE = "<think>", "</think>"
_PROBE = [{"role": "user", "content": "Hello"}]


class ChatTokenizer:
    """A target's tokenizer and chat template in one thinking mode."""

    def __init__(self, tokenizer: Any, target: TargetFacts, thinking: Thinking) -> None:
        self._tokenizer = tokenizer
        self._switch = {} if thinking == "none" else {"enable_thinking": thinking == "on"}
        self.target = target
        self.thinking = thinking
        self.special_texts = tuple(
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        )
        self.end_texts = tuple(tokenizer.convert_ids_to_tokens(list(target.eos_token_ids)))

    def render(self, messages: Sequence[dict[str, str]], *, ask: bool) -> str:
        """The conversation as text; with `ask`, up to where the assistant begins to speak.

        Raises DataError when the template refuses it: some take no system turn, for one.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=ask, **self._switch
            )
        except Exception as problem:  # a template is a program: it may raise anything
            reason = show_text(str(problem).strip().split("\n")[0])
            raise DataError(f"the chat template refuses the conversation: {reason}") from None
        return str(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of rendered text: no further begin or end token is added."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def require_plain(self, messages: Iterable[dict[str, str]]) -> None:
        """Raises DataError when a message holds the text of a control token."""
        for message in messages:
            for special in self.special_texts:
                if special in message["content"]:
                    raise DataError(f"the {message['role']} text holds the control token {special}")

    def encode_prompt(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Ids of the conversation up to its last user turn, ready for the assistant's answer."""
        asked = list(messages)
        while asked and asked[-1]["role"] != "user":
            asked.pop()
        if not asked:
            raise DataError("there is no user turn")
        self.require_plain(asked)
        return self.encode(self.render(asked, ask=True))

    def thinking_problem(self, text: str) -> str | None:
        """What is wrong with the think tags of one assistant turn, None when nothing is.

        text: from where the template hands over to the assistant to the end of the turn.
        """
        opened, closed = text.count(_OPEN), text.count(_CLOSE)
        right = [(1, 1)] if self.thinking == "on" else [(0, 0), (1, 1)]
        if (opened, closed) in right and text.find(_OPEN) <= text.find(_CLOSE):
            return None
        return f"{opened} opening and {closed} closing think tags (thinking {self.thinking})"

    def answer_problem(self, messages: Sequence[dict[str, str]], ids: Sequence[int]) -> str | None:
        """thinking_problem of a whole row: prompt ids + output ids."""
        asked = list(messages)
        while asked and asked[-1]["role"] != "user":
            asked.pop()
        before = self.render(asked, ask=False)
        whole = self.decode(ids)
        return self.thinking_problem(whole.removeprefix(before))


@lru_cache(maxsize=4)
def _load(path: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtraError(
            "turning text into token ids needs transformers",
            fix="Run `pip install 'paceline[train]'`.",
        ) from None
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as problem:
        raise DataError(
            f"the target's tokenizer does not load: {str(problem).splitlines()[0]}", where=path
        ) from None


def open_tokenizer(target: TargetFacts, *, thinking: Thinking = "none") -> ChatTokenizer:
    """The target's tokenizer in one thinking mode: "on" or "off" where its template has a switch.

    Raises DataError without tokenizer or chat template, for a mode that the template does not
    know, and for "none" where it has the switch; MissingExtraError without transformers.
    """
    if target.tokenizer_sha256 is None or target.chat_template_sha256 is None:
        missing = "tokenizer.json" if target.tokenizer_sha256 is None else "chat template"
        raise DataError(
            f"the target has no {missing}",
            where=str(target.path),
            expected="a chat model with its tokenizer",
        )
    if thinking not in ("none", "on", "off"):
        raise DataError(f"thinking is {thinking!r}", expected="none, on or off")
    tokenizer = _load(str(target.path))
    has_switch = _has_switch(tokenizer, target)
    if has_switch and thinking == "none":
        raise DataError(
            "this target's template thinks or not, as it is told",
            where=str(target.path),
            expected="thinking on or off",
            fix="Choose the mode that will be served (--thinking).",
        )
    if not has_switch and thinking != "none":
        raise DataError(
            f"thinking {thinking} has no effect: the target's template has no such switch",
            where=str(target.path),
            fix="Leave the thinking mode out.",
        )
    return ChatTokenizer(tokenizer, target, thinking)


def _has_switch(tokenizer: Any, target: TargetFacts) -> bool:
    modes: tuple[Thinking, Thinking] = ("on", "off")
    on, off = (ChatTokenizer(tokenizer, target, mode).render(_PROBE, ask=True) for mode in modes)
    return on != off


def plain_thinking(target: TargetFacts) -> Thinking:
    """The mode that asks for an answer at once: "off" where the template has a switch, else "none".

    For requests whose text does not matter; whoever measures chooses. Raises as open_decoder does.
    """
    return "off" if _has_switch(_load(str(target.path)), target) else "none"


def open_decoder(target: TargetFacts) -> Callable[[Sequence[int]], str]:
    """Token ids -> text, control tokens included. Raises as open_tokenizer does."""
    return ChatTokenizer(_load(str(target.path)), target, "none").decode


def build_requests(
    prompts: Sequence[Prompt],
    target: TargetFacts,
    sampling: Sampling,
    *,
    thinking: Thinking = "none",
) -> list[Request]:
    """One request a prompt: its last user turn through the chat template, exact ids.

    Raises DataError naming the first prompt that cannot be used.
    """
    tokenizer = open_tokenizer(target, thinking=thinking)
    requests = []
    for prompt in prompts:
        try:
            ids = tokenizer.encode_prompt(prompt.messages)
        except DataError as problem:
            raise DataError(problem.what, where=f"prompt {prompt.prompt_id}") from None
        requests.append(Request(request_id=prompt.prompt_id, prompt_ids=ids, sampling=sampling))
    return requests
