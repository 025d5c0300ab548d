"""Writing a draft folder: checked against the contract first, then all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.draft.check_keys import check_config_keys
from paceline.draft.check_tensors import check_tensors
from paceline.draft.contracts import Contract, build_contract
from paceline.draft.read import Draft, read_draft
from paceline.draft.spec import check_spec
from paceline.draft.taps import check_tapped_layers
from paceline.errors import DraftError, MissingExtraError
from paceline.methods import METHODS
from paceline.problems import require_none
from paceline.records import atomic_folder, write_json
from paceline.safetensors_header import TensorInfo

if TYPE_CHECKING:
    import torch

__all__ = ["write_draft"]

_DTYPES = {
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
}


def write_draft(
    out_dir: str | Path,
    *,
    family: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    num_speculative_tokens: int,
    metadata: Mapping[str, Any],
    spec: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> Draft:
    """Writes exactly config.json, model.safetensors, spec.json and metadata.json.

    Tensors carry canonical names (`midlayer.*`). Raises DraftError before anything is written
    when a name, shape, dtype or value does not fit; StorageError when the disk refuses. A family
    without weights gets spec.json and metadata.json alone.
    """
    out_dir = Path(out_dir)
    full_spec = {
        "family": family,
        "num_speculative_tokens": num_speculative_tokens,
        **(spec or {}),
    }
    require_none(check_spec(full_spec), DraftError, folder=str(out_dir))
    contract = build_contract(family, config)
    infos = {name: _describe(name, tensor) for name, tensor in tensors.items()}
    # stricter than the reader: what vLLM would ignore is not written at all
    for problems in (
        check_config_keys(family, config),
        check_tapped_layers(config) if family == "eagle3" else [],
        check_tensors(contract, {"model.safetensors": infos}),
    ):
        require_none(problems, DraftError, folder=str(out_dir))
    for name, tensor in tensors.items():
        # 8-bit floats have no isfinite of their own
        wide = tensor.float() if str(tensor.dtype).startswith("torch.float8") else tensor
        if tensor.is_floating_point() and not bool(wide.isfinite().all()):
            raise DraftError(
                f"tensor '{name}' holds NaN or infinity",
                where=f"{out_dir}/model.safetensors",
                expected="finite weights",
                fix="The training run diverged: lower the learning rate or start again.",
            )
    with atomic_folder(out_dir, replace=replace) as folder:
        write_json(folder / "spec.json", full_spec)
        write_json(folder / "metadata.json", _tell_shared(metadata, tensors, contract))
        if METHODS[family].has_weights:
            write_json(folder / "config.json", config)
            _save(folder / "model.safetensors", tensors)
        read_draft(folder)  # what lies on the disk is what was meant, or nothing appears
    return read_draft(out_dir)


def _tell_shared(
    metadata: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], contract: Contract
) -> dict[str, Any]:
    """Records which layers the draft borrows from the target, so that a check can tell."""
    result = dict(metadata)
    if contract.variant is not None and contract.variant.shared:
        trained = dict(result.get("trained") or {})
        for key, name in (("embeddings", "embed_tokens.weight"), ("lm_head", "lm_head.weight")):
            trained.setdefault(key, "own" if name in tensors else "shared with the target")
        result["trained"] = trained
    return result


def _describe(name: str, tensor: torch.Tensor) -> TensorInfo:
    dtype = _DTYPES.get(str(tensor.dtype), str(tensor.dtype))
    return TensorInfo(name=name, dtype=dtype, shape=tuple(tensor.shape), start=0, end=0)


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    try:
        from safetensors.torch import save
    except ImportError:
        raise MissingExtraError(
            "writing weights needs torch and safetensors", fix="pip install 'paceline[train]'"
        ) from None
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    # own write call: a full disk then is an OSError, which safetensors' save_file would hide
    path.write_bytes(save(plain, metadata={"format": "pt"}))
