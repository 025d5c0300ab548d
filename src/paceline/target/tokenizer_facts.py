"""Facts of a target's tokenizer and chat template, read as JSON: no transformers needed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import TargetError
from paceline.records import read_json, sha256_bytes

__all__ = ["TokenizerFacts", "read_tokenizer_facts"]


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """num_tokens: distinct token ids. chat_template: the Jinja text. None: the folder has none."""

    num_tokens: int | None
    sha256: str | None
    chat_template: str | None


def read_tokenizer_facts(folder: Path) -> TokenizerFacts:
    """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja of one folder.

    Raises TargetError for a file that is there and cannot be read.
    """
    num_tokens, sha256 = None, None
    path = folder / "tokenizer.json"
    if path.exists():
        num_tokens, sha256 = _fingerprint(read_json(path, error=TargetError), path)
    return TokenizerFacts(
        num_tokens=num_tokens, sha256=sha256, chat_template=_read_template(folder)
    )


def _fingerprint(tokenizer: dict[str, Any], path: Path) -> tuple[int, str]:
    """Hashes what decides the token ids, in a form free of the file's own formatting."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not vocab or not isinstance(vocab, dict | list):
        raise TargetError(
            "the tokenizer has no vocabulary",
            where=f"{path}: model.vocab",
            expected="a tokenizer.json written by the tokenizers library",
        )
    if isinstance(vocab, list):  # unigram: [[token, score], ...], the id is the place
        vocab = {json.dumps(entry): token_id for token_id, entry in enumerate(vocab)}
    added = tokenizer.get("added_tokens") or []
    # older files write a merge as "a b", newer ones as ["a", "b"]
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []
    ]
    decisive = {
        "kind": model.get("type"),
        "vocab": sorted(vocab.items(), key=lambda pair: (pair[1], pair[0])),
        "merges": merges,
        "added": sorted(
            (token["id"], token["content"], bool(token.get("special"))) for token in added
        ),
        "normalizer": tokenizer.get("normalizer"),
    }
    text = json.dumps(decisive, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    ids = set(vocab.values()) | {token["id"] for token in added}
    return len(ids), sha256_bytes(text.encode("ascii"))


def _read_template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise TargetError(f"cannot be read: {problem}", where=str(path)) from None
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return None
    template = read_json(path, error=TargetError).get("chat_template")
    if isinstance(template, list):  # several named templates; "default" is the one that is used
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise TargetError("the chat template is not text", where=f"{path}: chat_template")
    return template
