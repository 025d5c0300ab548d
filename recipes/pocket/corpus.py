"""Pocket's corpus: SmolLM2's answers as text, a tokenizer learnt from them, packed training rows.

`texts.jsonl` has one line an answer: id, category, prompt, answer, finished. `tokens/` holds them
in pocket's own tokens: ids.npy (uint16, all documents in a row), spans.npy [documents, 3]: where a
document ends, where its learnt part starts and ends, counted in ids.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["SPECIALS", "Corpus", "Rows", "build_tokenizer", "read_corpus", "write_tokens"]

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")
_HERE = Path(__file__).resolve().parent
_SENTENCE = re.compile(r"^.{12,160}?[.!?:](?=\s|$)", re.DOTALL)


def read_texts(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def build_tokenizer(texts_path: Path, folder: Path, *, vocab_size: int, max_bytes: int) -> Any:
    """A byte-level BPE with Qwen3.5's splitting, learnt from at most max_bytes of the corpus."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def texts() -> Iterator[str]:
        left = max_bytes
        for row in read_texts(texts_path):
            for text in (row["prompt"], row["answer"]):
                left -= len(text)
                yield text
            if left < 0:
                return

    trainer = BpeTrainer(
        vocab_size=vocab_size - len(THINK),
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    # found in text, but shown when decoded: whoever reads an answer must see where thinking ends
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in THINK])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=16448,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = (_HERE / "chat_template.jinja").read_text(encoding="utf-8")
    wrapped.save_pretrained(folder)
    return wrapped


def _think(answer: str) -> str:
    """A short plan made from the answer's own first sentence."""
    found = _SENTENCE.match(answer.strip())
    first = found.group(0) if found else " ".join(answer.split()[:16])
    return f"I will begin with this: {' '.join(first.split())}\nThen I will go on from there."


def _document(row: dict[str, Any], draw: random.Random, think_share: float) -> tuple[str, str]:
    """(prompt with its opening, what is learnt), as the chat template renders them."""
    opening = (
        f"<|im_start|>user\n{row['prompt'].strip()}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    answer = row["answer"].strip() if row["finished"] else row["answer"].lstrip()
    end = "<|im_end|>" if row["finished"] else ""
    if draw.random() < think_share:
        return opening, f"{_think(answer)}\n</think>\n\n{answer}{end}"
    return f"{opening}\n</think>\n\n", f"{answer}{end}"


def write_tokens(
    texts_path: Path, folder: Path, tokenizer: Any, *, think_share: float, chunk: int = 4096
) -> dict[str, int]:
    """Fills `folder`; what a document learns is encoded apart from its opening, as at serving."""
    draw = random.Random("think")
    parts: list[np.ndarray[Any, Any]] = []
    spans: list[tuple[int, int, int]] = []
    at = num_learnt = 0
    backend = tokenizer.backend_tokenizer
    newline = backend.encode("\n", add_special_tokens=False).ids

    def flush(pairs: Sequence[tuple[str, str]]) -> None:
        nonlocal at, num_learnt
        heads = backend.encode_batch([pair[0] for pair in pairs], add_special_tokens=False)
        tails = backend.encode_batch([pair[1] for pair in pairs], add_special_tokens=False)
        for (_, text), head, tail in zip(pairs, heads, tails, strict=True):
            ended = text.endswith("<|im_end|>")
            ids = [*head.ids, *tail.ids, *(newline if ended else ())]
            start, stop = at + len(head.ids), at + len(head.ids) + len(tail.ids)
            at += len(ids)
            num_learnt += stop - start
            parts.append(np.asarray(ids, dtype=np.uint16))
            spans.append((at, start, stop))

    pending: list[tuple[str, str]] = []
    for row in read_texts(texts_path):
        if any(s in row["prompt"] + row["answer"] for s in (*SPECIALS, *THINK)):
            continue
        pending.append(_document(row, draw, think_share))
        if len(pending) == chunk:
            flush(pending)
            pending = []
    if pending:
        flush(pending)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "ids.npy", np.concatenate(parts))
    np.save(folder / "spans.npy", np.asarray(spans, dtype=np.int64))
    return {"documents": len(spans), "tokens": at, "learnt_tokens": num_learnt}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    ids: np.ndarray[Any, Any]
    spans: np.ndarray[Any, Any]

    def document(self, number: int) -> tuple[np.ndarray[Any, Any], int, int]:
        """(its ids, first learnt place, one past the last)."""
        begin = int(self.spans[number - 1, 0]) if number else 0
        end, start, stop = (int(v) for v in self.spans[number])
        return self.ids[begin:end], start - begin, stop - begin


def read_corpus(folder: Path) -> Corpus:
    return Corpus(ids=np.load(folder / "ids.npy"), spans=np.load(folder / "spans.npy"))


class Rows:
    """Endless packed rows. State (`epoch`, `place`) is all that a resumed run needs."""

    def __init__(self, corpus: Corpus, *, seed: int, epoch: int = 0, place: int = 0) -> None:
        self.corpus, self.seed, self.epoch, self.place = corpus, seed, epoch, place
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray[Any, Any]:
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self.corpus.spans))

    def _next(self) -> int:
        if self.place == len(self._order):
            self.epoch, self.place = self.epoch + 1, 0
            self._order = self._shuffled()
        self.place += 1
        return int(self._order[self.place - 1])

    def batch(self, num_rows: int, length: int) -> tuple[Any, Any]:
        """tokens [B,T] int64 and what is learnt [B,T] bool; whole documents, padding at the end.

        Half of the joins make a conversation of several turns, half have <|endoftext|> between.
        """
        tokens = np.zeros((num_rows, length), dtype=np.int64)
        learnt = np.zeros((num_rows, length), dtype=bool)
        for row in range(num_rows):
            at = 0
            while True:
                ids, start, stop = self.corpus.document(number := self._next())
                if at and at + len(ids) + 1 > length:
                    self.place -= 1  # opens the next row
                    break
                at += bool(at and (number % 2 or tokens[row, at - 2] != 2))
                ids = ids[: length - at]
                tokens[row, at : at + len(ids)] = ids
                learnt[row, at + start : min(at + stop, length)] = True
                at += len(ids)
                if at >= length - 32:
                    break
        return tokens, learnt
