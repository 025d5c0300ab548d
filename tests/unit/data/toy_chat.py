"""A target whose tokenizer has one token a character, and an engine that answers from a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from paceline.endpoint import Answer, EngineFacts, Request
from paceline.errors import EngineError
from paceline.target import TargetFacts, read_target

PLAIN = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
ALWAYS_THINKS = PLAIN.replace("<s>assistant:{% endif %}", "<s>assistant:<think>\n{% endif %}")
SWITCH = PLAIN.replace(
    "<s>assistant:{% endif %}",
    "<s>assistant:{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}{% endif %}",
)
# writes no thoughts of earlier turns, as hybrid-thinking templates do
FORGETS = (
    "{% for m in messages %}<s>{{ m['role'] }}:"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
START, END = 256, 257


def make_chat_target(
    folder: Path, *, template: str | None = PLAIN, positions: int = 512
) -> TargetFacts:
    folder.mkdir(parents=True)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = [
        {
            "id": token_id,
            "content": text,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for token_id, text in ((START, "<s>"), (END, "<e>"))
    ]
    vocab = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {**vocab, "<s>": START, "<e>": END}, "merges": []},
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 258,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": START,
        "eos_token_id": END,
    }
    files: dict[str, Any] = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "<e>",
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return read_target(folder, require_weights=False)


class ScriptedEndpoint:
    """Answers with script(request) -> (output ids, finish reason); dies after `dies_after`."""

    def __init__(
        self,
        script: Callable[[Request], tuple[list[int], str]],
        *,
        dies_after: int | None = None,
        error: BaseException | None = None,
        max_model_len: int = 512,
    ) -> None:
        self.script = script
        self.dies_after = dies_after
        self.error = error or EngineError("the engine died")
        self.asked: list[Request] = []
        self.facts = EngineFacts(
            vllm_version="0.31.0",
            platform="cpu",
            device_name="scripted",
            method="none",
            num_speculative_tokens=0,
            runner="v1",
            target_architecture="LlamaForCausalLM",
            draft_architecture=None,
            rejection_sample_method=None,
            draft_sample_method=None,
            dtype="bfloat16",
            max_model_len=max_model_len,
            prefix_caching=False,
            enforce_eager=True,
            start_s=0.0,
        )

    def generate(
        self,
        requests: Sequence[Request],
        *,
        concurrency: int = 1,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> list[Answer]:
        answers = []
        for number, request in enumerate(requests):
            if number == self.dies_after:
                raise self.error
            self.asked.append(request)
            output, reason = self.script(request)
            answer = Answer(
                request_id=request.request_id,
                prompt_ids=request.prompt_ids,
                output_ids=tuple(output),
                finish_reason=reason,
                sent_at_s=0.0,
                chunk_times_s=(1.0,),
                chunk_tokens=(len(output),),
            )
            answers.append(answer)
            if on_answer is not None:
                on_answer(answer)
        return answers

    def next_token(self, prefixes: Any, *, top: int = 2) -> Any:
        raise NotImplementedError

    def counters(self) -> Any:
        raise NotImplementedError

    def memory(self, *, context_tokens: int = 16384) -> None:
        return None

    def close(self) -> None:
        pass
