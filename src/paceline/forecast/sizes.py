"""Tensors, bytes and reads of a design, by the shapes that vLLM 0.31.0 builds for its family.

Source of the facts: vllm/model_executor/models/{qwen3_5_mtp,llama_eagle3,medusa,qwen3_dflash,
llama}.py. Quantised weights are counted as the compressed-tensors format stores them.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.draft import build_contract
from paceline.errors import PlanError
from paceline.forecast.cache import LayerCache
from paceline.forecast.design import Design
from paceline.forecast.shape import DTYPE_BYTES, TargetShape

__all__ = ["DraftSizes", "DraftTensor", "draft_layers", "measure_design"]

_ATTENTION_SCALES_BYTES = 16  # four float32 numbers that every attention layer keeps
_HEADER_BYTES_PER_TENSOR = 110
_OTHER_FILES_BYTES = 4096  # config.json, spec.json, metadata.json: an allowance


@dataclass(frozen=True, kw_only=True)
class DraftTensor:
    """part: "layers", "fuse" (once a step), "embedding", "head", "norm" or "map" (token ids)."""

    name: str
    shape: tuple[int, ...]
    part: str

    @property
    def num_elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, kw_only=True)
class DraftSizes:
    """Bytes of one design.

    num_parameters: numbers in the files, scales apart. files_bytes: of the draft folder.
    weights_bytes, buffers_bytes: resident after sharing. load_peak_bytes: weights while they load,
    when copies of the target's matrices are still there. pass_bytes: weights that one draft pass
    reads, without the head; head_bytes: of the head it reads; fuse_bytes: read once a step.
    """

    num_parameters: int
    files_bytes: int
    weights_bytes: int
    buffers_bytes: int
    load_peak_bytes: int
    pass_bytes: int
    head_bytes: int
    fuse_bytes: int
    tensors: tuple[DraftTensor, ...]


def measure_design(design: Design, shape: TargetShape, *, context_tokens: int) -> DraftSizes:
    """All byte counts of a design. Raises PlanError when group_size does not divide a matrix."""
    tensors = _list_tensors(design, shape)
    stored = {tensor.name: _stored_bytes(tensor, design, shape) for tensor in tensors}
    weights = sum(stored.values())

    def part(*names: str) -> int:
        return sum(stored[tensor.name] for tensor in tensors if tensor.part in names)

    facts = shape.facts
    head = part("head")
    shares_head = design.family in ("mtp", "eagle3", "dflash") and not design.own_head
    shares_rows = design.family in ("mtp", "eagle3", "dflash") and not design.own_embedding
    matrix = facts.vocab_size * facts.hidden_size * shape.dtype_bytes
    if shares_head or (design.family == "draft_model" and not design.own_head):
        head = matrix if shares_head else part("embedding")
    tied_mtp = design.family == "mtp" and facts.tie_word_embeddings
    peak = weights + (matrix if shares_rows else 0)
    peak += matrix if shares_head and not tied_mtp else 0
    return DraftSizes(
        num_parameters=sum(t.num_elements for t in tensors if t.part != "map"),
        files_bytes=weights + _HEADER_BYTES_PER_TENSOR * len(tensors) + _OTHER_FILES_BYTES,
        weights_bytes=weights,
        buffers_bytes=_buffers_bytes(design, shape, context_tokens),
        load_peak_bytes=peak,
        pass_bytes=part("layers", "norm"),
        head_bytes=head,
        fuse_bytes=part("fuse"),
        tensors=tuple(tensors),
    )


def draft_layers(design: Design, shape: TargetShape, block_tokens: int) -> list[LayerCache]:
    """The draft's own layer caches; the engine gives them the target's block size."""
    if not design.num_kv_heads:
        return []
    element = DTYPE_BYTES[design.kv_dtype]
    layer = LayerCache(
        kind="sliding" if design.window else "full",
        block_tokens=block_tokens,
        page_bytes=block_tokens * 2 * design.num_kv_heads * design.head_dim * element,
        geometry=(design.num_kv_heads, design.head_dim, element),
        window=design.window or None,
    )
    return [layer] * design.num_layers


def _list_tensors(design: Design, shape: TargetShape) -> list[DraftTensor]:
    if design.family in ("ngram", "suffix"):
        return []
    if design.family == "medusa":
        return _medusa(design)
    if design.family == "eagle3":
        return _eagle3(design, shape)
    hidden, found = design.hidden_size, []
    if design.family == "mtp":
        found += [_tensor("mtp.fc.weight", "layers", hidden, 2 * hidden)]
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            found.append(_tensor(f"mtp.{name}.weight", "norm", hidden))
    else:
        found.append(_tensor("norm.weight", "norm", hidden))
    if design.family == "dflash":
        taps = design.num_taps * shape.facts.hidden_size
        found.append(_tensor("fc.weight", "fuse", hidden, taps))
        found.append(_tensor("hidden_norm.weight", "norm", hidden))
    for index in range(design.num_layers):
        found += _decoder_layer(design, shape, index)
    if design.own_embedding:
        found.append(_tensor("embed_tokens.weight", "embedding", design.vocab_size, hidden))
    if design.own_head:
        found.append(_tensor("lm_head.weight", "head", design.draft_vocab_size, hidden))
    if design.has_draft_vocabulary:
        found.append(_tensor("d2t", "map", design.draft_vocab_size))
    return found


def _decoder_layer(design: Design, shape: TargetShape, index: int) -> list[DraftTensor]:
    hidden, inner = design.hidden_size, design.intermediate_size
    query, key = design.num_heads * design.head_dim, design.num_kv_heads * design.head_dim
    gate = 2 if design.family == "mtp" and shape.gated_attention else 1
    matrices = {
        "self_attn.q_proj": (query * gate, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if design.family in ("mtp", "dflash"):
        norms |= {"self_attn.q_norm": design.head_dim, "self_attn.k_norm": design.head_dim}
    prefix = f"layers.{index}"
    found = [_tensor(f"{prefix}.{name}.weight", "layers", *size) for name, size in matrices.items()]
    return found + [
        _tensor(f"{prefix}.{name}.weight", "norm", size) for name, size in norms.items()
    ]


def _medusa(design: Design) -> list[DraftTensor]:
    hidden, heads = design.hidden_size, design.num_speculative_tokens
    found = [
        _tensor(f"blocks.{head}.layers.{layer}.weight", "layers", hidden, hidden)
        for head in range(heads)
        for layer in range(design.num_layers)
    ]
    names = ["lm_head"] if design.one_head else [f"lm_heads.{head}" for head in range(heads)]
    found += [_tensor(f"{n}.weight", "head", design.draft_vocab_size, hidden) for n in names]
    if design.has_draft_vocabulary:
        found.append(_tensor("token_map", "map", design.draft_vocab_size))
    return found


def _eagle3(design: Design, shape: TargetShape) -> list[DraftTensor]:
    """By the draft room's own contract, so that forecast and validator cannot disagree."""
    config = {
        "hidden_size": design.hidden_size,
        "target_hidden_size": shape.facts.hidden_size,
        "intermediate_size": design.intermediate_size,
        "num_hidden_layers": design.num_layers,
        "num_attention_heads": design.num_heads,
        "num_key_value_heads": design.num_kv_heads,
        "head_dim": design.head_dim,
        "vocab_size": design.vocab_size,
        "draft_vocab_size": design.draft_vocab_size,
        "num_aux_hidden_states": design.num_taps,
    }
    if design.parallel:
        config["mask_token_id"] = design.vocab_size - 1
    own = {"lm_head.weight": design.own_head, "embed_tokens.weight": design.own_embedding}
    parts = {"fc.weight": "fuse", "lm_head.weight": "head", "embed_tokens.weight": "embedding"}
    found = []
    for name, rule in build_contract("eagle3", config).tensors.items():
        if name == "t2d" or rule.unread or not own.get(name, True):
            continue
        is_small = len(rule.shape) == 1 or name == "mask_hidden"
        part = "norm" if is_small else "layers"
        part = "map" if name == "d2t" else parts.get(name, part)
        found.append(_tensor(name, part, *rule.shape))
    return found


def _tensor(name: str, part: str, *shape: int) -> DraftTensor:
    return DraftTensor(name=name, shape=shape, part=part)


def _stored_bytes(tensor: DraftTensor, design: Design, shape: TargetShape) -> int:
    """Bytes of one tensor and its scales. Norms, embeddings and heads stay in 16 bit."""
    if tensor.part == "map":
        return 8 * tensor.num_elements
    if tensor.part not in ("layers", "fuse") or design.weights == "bf16":
        return shape.dtype_bytes * tensor.num_elements
    rows, columns = tensor.shape
    if design.weights == "fp8":
        return rows * columns + 4 * rows  # one float32 scale a row
    group = design.group_size or columns
    if columns % group:
        raise PlanError(
            f"group_size {group} does not divide the {columns} inputs of {tensor.name}",
            where="design: group_size",
            expected=f"a divisor of {columns}",
        )
    bits = 4 if design.weights == "w4a16" else 8
    packed = 4 * rows * -(-columns * bits // 32)  # int32 words
    return packed + 2 * rows * (columns // group) + 16  # 16-bit scales; the shape as two int64


def _dflash_copies(design: Design) -> int:
    """Numbers that vLLM holds beside a DFlash draft's file: an embedding for the mask, the norms of
    the keys side by side and, of 16-bit weights, the key and value matrices once more."""
    keys = 2 * design.num_kv_heads * design.head_dim * design.hidden_size
    each = design.head_dim + (keys if design.weights == "bf16" else 0)
    return design.hidden_size + design.num_layers * each


def _buffers_bytes(design: Design, shape: TargetShape, context_tokens: int) -> int:
    """Rotary tables that the target does not already hold, and the attention scales."""
    if not design.num_kv_heads:
        return 0
    scales = _ATTENTION_SCALES_BYTES * design.num_layers
    if design.family == "dflash":
        scales += _dflash_copies(design) * shape.dtype_bytes
    facts = shape.facts
    rope = facts.rope_parameters
    same = (
        design.head_dim == facts.head_dim
        and design.max_position_embeddings == facts.max_position_embeddings
        and "mrope_section" not in rope
    )
    if design.family == "mtp" or same:
        return scales
    rotary = int(design.head_dim * float(rope.get("partial_rotary_factor", 1.0)))
    rows = design.max_position_embeddings
    if design.family == "eagle3":  # vLLM raises its positions to the served length
        rows = max(rows, context_tokens)
    return scales + rows * rotary * shape.dtype_bytes
