"""A streamed answer whose server dies is continued on another from the tokens already sent.

Every stream is asked with its token ids and its usage. When a server is lost, the rest is asked of
the next one as a plain completion of `prompt ids + sent ids`: greedy text goes on as the target
would have gone on after the text that the client already holds. A sampled answer goes on as a
sample of the target's own distribution, with another seed (the first one's random numbers are used
up), so it is not the text that the same seed gives undisturbed.

Text is cut where tokens and text agree: a token of half a character, or text that is held back for
a stop string, is generated again and compared with what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["BrokenStream", "Decode", "LostStream", "Stream", "explain_not_resumable"]

# parameters under which an answer may go on from its tokens; None: whatever the value
_RESUMABLE: Mapping[str, tuple[Any, ...] | None] = {
    "model": None,
    "prompt": None,
    "messages": None,
    "stream": None,
    "stream_options": None,
    "max_tokens": None,
    "max_completion_tokens": None,
    "min_tokens": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": None,
    "logit_bias": None,
    "priority": None,
    "user": None,
    "chat_template_kwargs": None,
    "return_token_ids": None,
    "n": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "logprobs": (False,),
}
_CARRIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "priority",
    "user",
)
_SEEDS = 2**63
Decode = Callable[[Sequence[int], Sequence[int]], list[str]]  # (prompt, answer) -> text a token


class LostStream(Exception):
    """The server was lost; what it sent last does not count."""


class BrokenStream(Exception):
    """The answer cannot go on: the next server did not repeat what was sent (a near tie fell the
    other way), or tokens were sent whose text was still held back."""


def explain_not_resumable(body: Mapping[str, Any]) -> str | None:
    """Which parameter of a streamed request forbids to continue it; None when none does."""
    for name, value in body.items():
        if value is None:
            continue
        if name not in _RESUMABLE:
            return name
        allowed = _RESUMABLE[name]
        if allowed is not None and value not in allowed:
            return name
    prompt = body.get("prompt")
    single = isinstance(prompt, str) or (
        isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    )
    if "messages" not in body and not single:
        return "prompt"
    options = body.get("stream_options") or {}
    extra = sorted(set(options) - {"include_usage"})
    return f"stream_options.{extra[0]}" if extra else None


class Stream:
    """What one streamed request was asked and what of its answer was sent. Knows no network."""

    def __init__(self, body: Mapping[str, Any], *, chat: bool, max_model_len: int) -> None:
        self.body = body
        self.chat = chat
        self.max_model_len = max_model_len
        self.obstacle = explain_not_resumable(body)
        self.is_finished = False
        self.speculation: list[Mapping[str, Any]] = []
        self._prompt_ids: tuple[int, ...] = ()
        self._ids: list[int] = []
        self._text = ""
        self._head: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._is_continued = False
        self._num_ended = 0
        self._kept = 0  # tokens of earlier servers in the answer
        self._overlap = ""  # text that the next server has to repeat

    @property
    def has_begun(self) -> bool:
        """Whether the client holds a part of the answer."""
        return bool(self._head)

    def first_body(self) -> dict[str, Any]:
        """The request as asked first: with its usage and, where it is resumable, its tokens."""
        options = {**(self.body.get("stream_options") or {}), "include_usage": True}
        asked = {**self.body, "stream_options": options}
        return asked if self.obstacle else {**asked, "return_token_ids": True}

    def next_body(self, decode: Decode) -> dict[str, Any]:
        """The rest as a completion for the next server. Only for a resumable stream that began.

        Raises BrokenStream.
        """
        texts = decode(self._prompt_ids, self._ids)
        kept = _find_cut(texts, len(self._text))
        if kept < len(self._ids) and self.body.get("return_token_ids"):
            raise BrokenStream  # the client holds tokens that would come again
        before = "".join(texts[:kept])
        del self._ids[kept:]
        self._overlap = self._text[len(before) :]
        self._kept, self._is_continued = kept, True
        given = self.body
        limit = given.get("max_completion_tokens") or given.get("max_tokens")
        if limit is None:
            limit = self.max_model_len - len(self._prompt_ids) if self.chat else 16
        asked = {name: given[name] for name in _CARRIED if given.get(name) is not None}
        asked |= {
            "model": given.get("model"),
            "prompt": [*self._prompt_ids, *self._ids],
            "max_tokens": limit - kept,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if given.get("min_tokens"):
            asked["min_tokens"] = max(0, given["min_tokens"] - kept)
        if given.get("seed") is not None:
            asked["seed"] = (given["seed"] + kept) % _SEEDS
        return asked

    def take(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """One event of the server's -> the event for the client; None where it gets none.

        Raises LostStream for an event that only says that the server is ending, BrokenStream where
        a text that was sent is not repeated.
        """
        if event.get("usage") is not None and not event.get("choices"):
            self._usage = event
            found = (event.get("metrics") or {}).get("speculative_decoding")
            if found:
                self.speculation.append(found)
            return None
        choices = event.get("choices") or []
        if any(choice.get("finish_reason") == "abort" for choice in choices):
            raise LostStream("aborted")
        if self.obstacle or not choices:
            self._head = self._head or {"id": event.get("id")}
            self._num_ended += sum(1 for choice in choices if choice.get("finish_reason"))
            self.is_finished = self._num_ended >= _count_choices(self.body)
            return event
        return self._take_plain(event, choices[0])

    def _take_plain(self, event: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any] | None:
        prompt_ids = event.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt_ids and not self._prompt_ids:
            self._prompt_ids = tuple(prompt_ids)
        ids, finish = choice.get("token_ids") or [], choice.get("finish_reason")
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        if self._overlap:
            text = self._drop_overlap(text, ended=bool(finish))
        self._ids += ids
        self._text += text
        self.is_finished = bool(finish)
        if self._is_continued:
            return self._convert(choice, text, ids)
        if not self._head:
            self._head = {key: event[key] for key in ("id", "object", "created", "model")}
        if not self.body.get("return_token_ids"):
            for holder in (event, choice):
                holder.pop("token_ids", None)
                holder.pop("prompt_token_ids", None)
            if "delta" in choice and not choice["delta"] and not finish:
                return None  # a chunk that only our asking for token ids made
        return event

    def _drop_overlap(self, text: str, *, ended: bool) -> str:
        known = min(len(text), len(self._overlap))
        if text[:known] != self._overlap[:known] or (ended and known < len(self._overlap)):
            raise BrokenStream
        self._overlap = self._overlap[known:]
        return text[known:]

    def _convert(
        self, choice: Mapping[str, Any], text: str, ids: Sequence[int]
    ) -> dict[str, Any] | None:
        """A completion's event in the form, and under the id, of the stream it continues."""
        finish = choice.get("finish_reason")
        shows_ids = self.body.get("return_token_ids")
        if not text and not finish and not shows_ids:
            return None
        made: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        made |= {"delta": {"content": text} if text else {}} if self.chat else {"text": text}
        if finish or not self.chat:
            made["stop_reason"] = choice.get("stop_reason")
        if shows_ids:
            made["token_ids"] = list(ids)
        return {**self._head, "choices": [made]}

    def last_events(self) -> list[dict[str, Any]]:
        """What follows the answer: its usage, if the client asked for it."""
        options = self.body.get("stream_options") or {}
        if not options.get("include_usage") or self._usage is None:
            return []
        usage = dict(self._usage)
        if self._is_continued:
            total = self._kept + usage["usage"]["completion_tokens"]
            prompt = len(self._prompt_ids)
            usage |= {
                **self._head,
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": total,
                    "total_tokens": prompt + total,
                },
            }
            usage.pop("metrics", None)  # of the last part alone
        return [usage]


def _count_choices(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return (len(prompt) if several and prompt else 1) * (body.get("n") or 1)


def _find_cut(texts: Sequence[str], length: int) -> int:
    """How many tokens make at most `length` characters; the fewest of those that make as many."""
    made, best, best_length = 0, 0, 0
    for count, text in enumerate(texts, 1):
        made += len(text)
        if made > length:
            break
        if made > best_length:
            best, best_length = count, made
    return best
