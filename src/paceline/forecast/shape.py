"""The target as a forecast sees it: sizes, caches and bytes, read from a config.json alone."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.errors import PlanError, TargetError
from paceline.forecast.cache import LayerCache, align_block_tokens
from paceline.target import TargetFacts, read_target

__all__ = [
    "DTYPE_BYTES",
    "CachePlan",
    "TargetShape",
    "build_shape",
    "list_shapes",
    "read_shape",
    "target_layers",
]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
_ALIGNMENT = {"cuda": 16, "cpu": 128}


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """One Gated-DeltaNet layer. conv_width: rows of its convolution; heads are value heads."""

    conv_width: int
    conv_kernel: int
    num_value_heads: int
    value_head_dim: int
    key_head_dim: int
    num_key_heads: int
    state_dtype_bytes: int

    def state_bytes(self, num_speculative_tokens: int, dtype_bytes: int) -> int:
        """Bytes of one state: the convolution keeps K tokens more when K are drafted."""
        conv = self.conv_width * (self.conv_kernel - 1 + num_speculative_tokens) * dtype_bytes
        matrix = self.num_value_heads * self.value_head_dim * self.key_head_dim
        return conv + matrix * self.state_dtype_bytes


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """What a forecast needs of a target. weights_bytes: all matrices of the text model, 16 bit.

    confirmed: False for a bundled shape that no real config.json has confirmed yet.
    """

    facts: TargetFacts
    confirmed: bool
    num_full_layers: int
    num_state_layers: int
    state: StateSizes | None
    gated_attention: bool
    dtype_bytes: int
    num_parameters: int
    embedding_parameters: int

    @property
    def weights_bytes(self) -> int:
        return self.num_parameters * self.dtype_bytes

    @property
    def streamed_bytes(self) -> int:
        """Weights that one forward pass reads: all but the rows of an untied embedding."""
        tied = self.facts.tie_word_embeddings
        own = self.num_parameters - (0 if tied else self.embedding_parameters)
        return own * self.dtype_bytes


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """How the engine is set up; prefix caching is off, as in every measured run.

    device: "cuda" or "cpu", whose pages differ; PlanError for another. kv_dtype: of the target's
    own layers. in_flight_tokens: the engine's max_num_batched_tokens, twice with asynchronous
    scheduling; windows keep blocks for it.
    """

    device: str = "cuda"
    kv_dtype: str = "bfloat16"
    in_flight_tokens: int = 16384

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise PlanError(f"device {self.device!r} is unknown", expected="cpu or cuda")


def list_shapes() -> tuple[str, ...]:
    """Names of the bundled shapes, sorted."""
    folder = resources.files("paceline.forecast") / "shapes"
    return tuple(sorted(p.name.removesuffix(".json") for p in folder.iterdir()))


def read_shape(spec: str | Path) -> TargetShape:
    """A bundled shape by name, else what `read_target` takes; weights are not needed.

    Raises TargetError for no such target or a config without a size.
    """
    name = str(spec)
    if name.lower() not in list_shapes():
        try:
            return build_shape(read_target(spec, require_weights=False))
        except TargetError as error:
            if error.what != "there is no such target":
                raise
            raise TargetError(
                error.what,
                where=name,
                expected=f"smollm2, a folder with config.json, or {', '.join(list_shapes())}",
                fix="Check the spelling of --target.",
            ) from None
    text = (resources.files("paceline.forecast") / "shapes" / f"{name.lower()}.json").read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name.lower()
        path.mkdir()
        (path / "config.json").write_text(text, encoding="utf-8")
        return build_shape(read_target(path, require_weights=False), confirmed=False)


def build_shape(facts: TargetFacts, *, confirmed: bool = True) -> TargetShape:
    """Counts parameters and layers. Raises PlanError for a target that is no dense Llama or Qwen.

    Attention counts as gated where the config says so, and for Qwen3.5 where it says nothing.
    """
    text: dict[str, Any] = {**facts.config, **(facts.config.get("text_config") or {})}
    if text.get("num_experts") or text.get("num_local_experts"):
        raise PlanError(
            "the target is a mixture of experts",
            where=facts.name,
            expected="a dense Llama or Qwen style target, or a Gated-DeltaNet hybrid",
            fix="A forecast for it is not there yet.",
        )
    hidden, inner = facts.hidden_size, facts.intermediate_size
    linear = [kind for kind in facts.layer_types if "linear" in kind]
    other = [k for k in facts.layer_types if "linear" not in k and k != "full_attention"]
    if other:
        raise PlanError(
            f"the target has layers of kind '{other[0]}'",
            where=f"{facts.name}: layer_types",
            expected="full_attention and linear_attention",
            fix="A forecast for other kinds is not there yet.",
        )
    state = _read_state(text, facts) if linear else None
    gated = bool(text.get("attn_output_gate", state is not None))
    query = facts.num_attention_heads * facts.head_dim
    key = facts.num_key_value_heads * facts.head_dim
    feed_forward = 3 * hidden * inner
    full = hidden * (query * (2 if gated else 1) + 2 * key + query) + feed_forward + 2 * hidden
    recurrent = 0
    if state is not None:
        value = state.num_value_heads * state.value_head_dim
        recurrent = hidden * (state.conv_width + 2 * value + 2 * state.num_value_heads)
        recurrent += state.conv_width * state.conv_kernel + feed_forward + 2 * hidden
    num_full = len(facts.layer_types) - len(linear)
    embedding = facts.vocab_size * hidden
    total = num_full * full + len(linear) * recurrent + hidden
    total += embedding * (1 if facts.tie_word_embeddings else 2)
    return TargetShape(
        facts=facts,
        confirmed=confirmed,
        num_full_layers=num_full,
        num_state_layers=len(linear),
        state=state,
        gated_attention=gated,
        dtype_bytes=DTYPE_BYTES.get(facts.dtype or "bfloat16", 2),
        num_parameters=total,
        embedding_parameters=embedding,
    )


def _read_state(text: dict[str, Any], facts: TargetFacts) -> StateSizes:
    def size(key: str) -> int:
        value = text.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise TargetError(
                "is missing" if value is None else f"is {value!r}",
                where=f"{facts.name}: {key}",
                expected="a whole number: the target has linear-attention layers",
            )
        return value

    key_heads, value_heads = size("linear_num_key_heads"), size("linear_num_value_heads")
    key_dim, value_dim = size("linear_key_head_dim"), size("linear_value_head_dim")
    return StateSizes(
        conv_width=2 * key_heads * key_dim + value_heads * value_dim,
        conv_kernel=size("linear_conv_kernel_dim"),
        num_value_heads=value_heads,
        value_head_dim=value_dim,
        key_head_dim=key_dim,
        num_key_heads=key_heads,
        # without the key vLLM keeps the state in the model's dtype
        state_dtype_bytes=DTYPE_BYTES.get(str(text.get("mamba_ssm_dtype") or facts.dtype), 2),
    )


def target_layers(
    shape: TargetShape, plan: CachePlan, num_speculative_tokens: int
) -> list[LayerCache]:
    """The target's layer caches in model order, as the engine sets them up for this K."""
    facts = shape.facts
    alignment = _ALIGNMENT[plan.device]
    element = DTYPE_BYTES[plan.kv_dtype]
    per_token = 2 * facts.num_key_value_heads * facts.head_dim * element
    block = alignment
    state_page = 0
    if shape.state is not None:
        state_page = shape.state.state_bytes(num_speculative_tokens, shape.dtype_bytes)
        block = align_block_tokens(state_page, per_token, alignment_tokens=alignment)
    attention = LayerCache(
        kind="full",
        block_tokens=block,
        page_bytes=block * per_token,
        geometry=(facts.num_key_value_heads, facts.head_dim, element),
    )
    recurrent = LayerCache(
        kind="state",
        block_tokens=0,  # its page is one state, whatever the tokens
        page_bytes=max(state_page, block * per_token),
        geometry=(),
        num_states=1 + num_speculative_tokens,
    )
    return [recurrent if "linear" in kind else attention for kind in facts.layer_types]
