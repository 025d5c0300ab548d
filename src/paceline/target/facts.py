"""The facts of a target that a draft must match, read from its folder without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import TargetError
from paceline.records import read_json, sha256_bytes
from paceline.safetensors_header import TensorInfo
from paceline.target.resolve import MANIFEST_NAME, resolve_target
from paceline.target.tokenizer_facts import read_tokenizer_facts
from paceline.target.weights import find_embedding, fingerprint_weights, read_weight_headers

__all__ = ["TargetFacts", "read_target"]

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What a target is. None means that the folder does not say.

    vocab_size counts embedding rows, padding included; num_tokenizer_tokens counts token ids.
    tokenizer_sha256 covers what decides token ids, not the file's formatting; weights_fingerprint
    covers tensor names, dtypes, shapes and file sizes, not the values.
    """

    name: str
    path: Path
    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_tokenizer_tokens: int | None
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope_parameters: dict[str, Any]
    tie_word_embeddings: bool
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    layer_types: tuple[str, ...]
    num_mtp_layers: int
    tokenizer_sha256: str | None
    chat_template_sha256: str | None
    weights_fingerprint: str | None
    config: dict[str, Any]

    @property
    def is_hybrid(self) -> bool:
        """True when some layers keep a recurrent state in place of a KV cache."""
        return any("linear" in kind or "mamba" in kind for kind in self.layer_types)


class _Config:
    """Looks keys up in the text config, then in the outer one."""

    def __init__(self, outer: dict[str, Any], path: Path) -> None:
        nested = outer.get("text_config")
        if nested is not None and not isinstance(nested, dict):
            raise TargetError("is not an object", where=f"{path}: text_config")
        self.levels = [nested, outer] if nested else [outer]
        self.path = path

    def find(self, *keys: str) -> Any:
        """First value that is there and not null, by level, then by key; else None."""
        for level in self.levels:
            for key in keys:
                if level.get(key) is not None:
                    return level[key]
        return None

    def wrong(self, key: str, expected: str) -> TargetError:
        found = self.find(key)
        what = "is missing" if found is None else f"is {found!r}"
        return TargetError(what, where=f"{self.path}: {key}", expected=expected)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.find(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "a whole number of at least 1")
        return value

    def text(self, *keys: str) -> str:
        value = self.find(*keys)
        if not isinstance(value, str):
            raise self.wrong(keys[0], "text")
        return value

    def token_id(self, key: str) -> int | None:
        value = self.find(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.wrong(key, "one token id")
        return value


def read_target(spec: str | Path, *, require_weights: bool = True) -> TargetFacts:
    """Reads the facts of a target: a bundled name or a folder.

    With require_weights=False a folder without weights is accepted (a shape to forecast with).
    Raises TargetError naming the file and key; and what `resolve_target` raises.
    """
    folder = resolve_target(str(spec))
    path = folder / "config.json"
    if not path.exists():
        raise TargetError(
            "the target folder has no config.json",
            where=str(folder),
            expected="a Hugging Face model folder",
        )
    outer = read_json(path, error=TargetError)
    config = _Config(outer, path)
    headers = read_weight_headers(folder, require_weights=require_weights)
    tensors = {name: info for header in headers.values() for name, info in header.tensors.items()}
    tokenizer = read_tokenizer_facts(folder)
    template = tokenizer.chat_template
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if config.find("head_dim") is None and hidden % heads:
        raise config.wrong("head_dim", f"a value, since {hidden} / {heads} is not whole")
    num_layers = config.count("num_hidden_layers")
    eps = config.find("rms_norm_eps")
    if not isinstance(eps, float | int) or isinstance(eps, bool):
        raise config.wrong("rms_norm_eps", "a number (dense Llama or Qwen style, or a hybrid)")
    architectures = outer.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise config.wrong("architectures", "a list with one class name")
    facts = TargetFacts(
        name=_read_name(folder),
        path=folder,
        architecture=str(architectures[0]),
        model_type=str(outer.get("model_type") or config.text("model_type")),
        hidden_size=hidden,
        intermediate_size=config.count("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=config.count("num_key_value_heads", heads),
        head_dim=config.count("head_dim", hidden // heads),
        vocab_size=config.count("vocab_size"),
        num_tokenizer_tokens=tokenizer.num_tokens,
        max_position_embeddings=config.count("max_position_embeddings"),
        rms_norm_eps=float(eps),
        hidden_act=config.text("hidden_act", "hidden_activation"),
        rope_parameters=_rope_parameters(config),
        tie_word_embeddings=_is_tied(config, tensors),
        dtype=_dtype(config, tensors),
        bos_token_id=config.token_id("bos_token_id"),
        eos_token_ids=_eos_token_ids(config, folder),
        pad_token_id=config.token_id("pad_token_id"),
        layer_types=_layer_types(config, num_layers),
        num_mtp_layers=config.find("mtp_num_hidden_layers", "num_nextn_predict_layers") or 0,
        tokenizer_sha256=tokenizer.sha256,
        chat_template_sha256=None if template is None else sha256_bytes(template.encode("utf-8")),
        weights_fingerprint=fingerprint_weights(headers) if headers else None,
        config=outer,
    )
    _check_embedding(facts, tensors)
    return facts


def _read_name(folder: Path) -> str:
    manifest = folder / MANIFEST_NAME
    if manifest.exists():
        return str(read_json(manifest, error=TargetError)["name"])
    return folder.name


def _rope_parameters(config: _Config) -> dict[str, Any]:
    """The rope in one form, whichever way the config spells it; theta 10000 where it says none."""
    stated = config.find("rope_parameters")
    if stated is None:
        scaling = config.find("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise config.wrong("rope_scaling", "an object")
        stated = {"rope_theta": config.find("rope_theta") or 10000.0, **scaling}
        stated["rope_type"] = stated.pop("type", None) or stated.get("rope_type") or "default"
    if not isinstance(stated, dict):
        raise config.wrong("rope_parameters", "an object")
    factor = config.find("partial_rotary_factor")
    if factor is not None and "partial_rotary_factor" not in stated:
        stated = {**stated, "partial_rotary_factor": factor}
    return stated


def _is_tied(config: _Config, tensors: dict[str, TensorInfo]) -> bool:
    stated = config.find("tie_word_embeddings")
    has_head = any(name.endswith(("lm_head.weight", "lm_head.weight_packed")) for name in tensors)
    if stated is None:
        return bool(tensors) and not has_head
    if tensors and not stated and not has_head:
        raise TargetError(
            "the config says that the output head is its own, but no lm_head.weight is there",
            where=f"{config.path}: tie_word_embeddings",
            expected="lm_head.weight, or tied embeddings",
        )
    return bool(stated)


def _dtype(config: _Config, tensors: dict[str, TensorInfo]) -> str | None:
    stated = config.find("dtype", "torch_dtype")
    if stated is not None:
        return str(stated).removeprefix("torch.")
    embedding = find_embedding(tensors)
    return _DTYPES.get(embedding.dtype) if embedding else None


def _check_embedding(facts: TargetFacts, tensors: dict[str, TensorInfo]) -> None:
    embedding = find_embedding(tensors)
    stated = (facts.vocab_size, facts.hidden_size)
    if embedding is not None and embedding.shape != stated:
        raise TargetError(
            f"{embedding.name} has shape {list(embedding.shape)}",
            where=str(facts.path),
            expected=f"{list(stated)}, as config.json says (vocab_size, hidden_size)",
        )


def _eos_token_ids(config: _Config, folder: Path) -> tuple[int, ...]:
    """Every id that ends an answer: the config's, then those of generation_config.json."""
    values = [config.find("eos_token_id")]
    path = folder / "generation_config.json"
    if path.exists():
        values.append(read_json(path, error=TargetError).get("eos_token_id"))
    ids: list[int] = []
    for value in values:
        listed: Iterable[Any] = value if isinstance(value, list) else [value]
        for token_id in listed:
            if token_id is not None and not isinstance(token_id, int):
                raise config.wrong("eos_token_id", "token ids")
            if token_id is not None and token_id not in ids:
                ids.append(token_id)
    return tuple(ids)


def _layer_types(config: _Config, num_layers: int) -> tuple[str, ...]:
    stated = config.find("layer_types")
    if stated is None:
        interval = config.find("full_attention_interval")
        if interval is None:
            return ("full_attention",) * num_layers
        return tuple(
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(num_layers)
        )
    if not isinstance(stated, list) or len(stated) != num_layers:
        raise config.wrong("layer_types", f"a list of {num_layers} names (num_hidden_layers)")
    return tuple(str(kind) for kind in stated)
