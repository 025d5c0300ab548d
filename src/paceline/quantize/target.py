"""A target folder in, the same target with quantised matrices out; every other tensor bit for bit.

The new folder holds whatever the old one held: tokenizer, templates, MTP head, vocabulary. What
changed is in config.json, in the weight files, and told in `quantized.json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.draft import unpack_codes
from paceline.errors import PlanError, StorageError, TargetError
from paceline.quantize.calibration import CalibrationRow
from paceline.quantize.schemes import describe_scheme
from paceline.quantize.target_plan import HEAD, TargetPlan, build_target_settings
from paceline.records import atomic_folder, build_provenance, storage_errors, write_json
from paceline.target import TargetFacts, read_target

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.quantize.grid import QuantizedWeight
    from paceline.quantize.target_layer import Quantized

__all__ = ["RECORD_NAME", "quantize_target", "round_target", "write_target"]

RECORD_NAME = "quantized.json"
_INDEX = "model.safetensors.index.json"
_LEFT_OUT = (_INDEX, "config.json", "paceline-target.json", RECORD_NAME)


def quantize_target(
    plan: TargetPlan,
    out_dir: str | Path,
    *,
    rows: Sequence[CalibrationRow] = (),
    where: str = "",
    calibrated_on: Mapping[str, Any] | None = None,
    device: str = "cpu",
    replace: bool = False,
    on_layer: Callable[[int, int], None] | None = None,
) -> TargetFacts:
    """`round_target` and `write_target` in one."""
    done = round_target(plan, out_dir, rows=rows, where=where, device=device, on_layer=on_layer)
    return write_target(plan, done, out_dir, calibrated_on=calibrated_on, replace=replace)


def round_target(
    plan: TargetPlan,
    out_dir: str | Path,
    *,
    rows: Sequence[CalibrationRow] = (),
    where: str = "",
    device: str = "cpu",
    on_layer: Callable[[int, int], None] | None = None,
) -> Quantized:
    """Codes and scales of every module. rows: needed by gptq and awq, not by rtn.

    out_dir: where the target will be written. Raises StorageError before any work where that disk
    cannot hold it; what run_target raises.
    """
    _require_space(plan, Path(out_dir))
    if plan.method == "rtn":
        return _round_all(plan)
    if not rows:
        raise PlanError(
            f"{plan.method} needs the target's own inputs",
            where="--data",
            expected="a data folder of this target (`paceline data answer`)",
            fix="Give --data, or take --method rtn, which rounds each weight on its own.",
        )
    from paceline.quantize.target_run import run_target

    return run_target(plan, rows, where=where, device=device, on_layer=on_layer)


def write_target(
    plan: TargetPlan,
    done: Quantized,
    out_dir: str | Path,
    *,
    calibrated_on: Mapping[str, Any] | None = None,
    distilled: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> TargetFacts:
    """Writes the quantised target, reads it back and holds every code and scale against `done`."""
    out_dir = Path(out_dir)
    with atomic_folder(out_dir, replace=replace) as folder:
        names = _write_weights(plan, done, folder)
        _require_complete(plan, done, names)
        _require_same(done, names, folder)
        write_json(folder / "config.json", _build_config(plan))
        write_json(folder / RECORD_NAME, _build_record(plan, done, calibrated_on, distilled))
        for path in sorted(Path(plan.target.path).iterdir()):
            if path.is_file() and path.suffix != ".safetensors" and path.name not in _LEFT_OUT:
                shutil.copyfile(path, folder / path.name)
        read_target(str(folder))
    return read_target(str(out_dir))


def _require_space(plan: TargetPlan, out_dir: Path) -> None:
    """The new folder is never larger than the old one and an output layer."""
    old = sum((Path(plan.target.path) / file).stat().st_size for file in set(plan.files.values()))
    needed = old + (4 * plan.target.vocab_size * plan.target.hidden_size if plan.head else 0)
    with storage_errors(out_dir):
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out_dir.parent).free
    if free < needed:
        raise StorageError(
            f"{free:,} bytes are free",
            where=str(out_dir.parent),
            expected=f"{needed:,} bytes, as much as the target takes",
            fix="Free some space, or write to another disk.",
        )


def _round_all(plan: TargetPlan) -> Quantized:
    import torch

    from paceline.quantize.grid import round_to_nearest
    from paceline.quantize.target_layer import Quantized

    weights: dict[str, QuantizedWeight] = {}
    for name, scheme in plan.schemes.items():
        dtype = torch.bfloat16 if scheme.is_packed else torch.float32
        wide = _read(plan, _source_name(plan, name)).float()
        weights[name] = round_to_nearest(wide, scheme, dtype=dtype)
    return Quantized(weights=weights, changed={}, errors={})


def _source_name(plan: TargetPlan, module: str) -> str:
    """The tensor that a module's weight comes from: for a tied head, the embeddings."""
    name = f"{module}.weight"
    if name in plan.tensors:
        return name
    assert module == HEAD
    return next(n for n in plan.tensors if n.endswith("embed_tokens.weight"))


def _read(plan: TargetPlan, name: str) -> Tensor:
    from safetensors import safe_open

    path = Path(plan.target.path) / plan.files[name]
    with safe_open(str(path.resolve()), framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def _write_weights(plan: TargetPlan, done: Quantized, folder: Path) -> dict[str, str]:
    """Each file again with its quantised tensors; tensor -> file, and an index if there was one."""
    from safetensors import safe_open
    from safetensors.torch import save

    from paceline.quantize.grid import build_tensors

    weight_map: dict[str, str] = {}
    total = 0
    files = sorted(set(plan.files.values()))
    home = plan.files[_source_name(plan, HEAD)] if plan.head is not None else ""
    for file in files:
        out: dict[str, Tensor] = {}
        path = (Path(plan.target.path) / file).resolve()
        with safe_open(str(path), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                module = name.removesuffix(".weight")
                if name.endswith(".weight") and module in done.weights:
                    out.update(build_tensors(module, done.weights[module]))
                else:
                    changed = done.changed.get(name)
                    out[name] = opened.get_tensor(name) if changed is None else changed
        if file == home and f"{HEAD}.weight" not in plan.tensors:
            out.update(build_tensors(HEAD, done.weights[HEAD]))
        plain = {name: tensor.cpu().contiguous() for name, tensor in out.items()}
        (folder / file).write_bytes(save(plain, metadata={"format": "pt"}))
        weight_map.update(dict.fromkeys(plain, file))
        total += sum(tensor.nbytes for tensor in plain.values())
    if len(files) > 1 or (Path(plan.target.path) / _INDEX).exists():
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / _INDEX, index)
    return weight_map


def _require_complete(plan: TargetPlan, done: Quantized, names: Mapping[str, str]) -> None:
    """Every tensor of the old folder is there again, as it was or in its quantised form."""
    for name in plan.tensors:
        module = name.removesuffix(".weight")
        if name not in names and not (
            module in done.weights and f"{module}.weight_packed" in names
        ):
            raise TargetError(f"tensor '{name}' was lost", where=str(plan.target.path))


def _require_same(done: Quantized, names: Mapping[str, str], folder: Path) -> None:
    """What lies on disk is what was made, bit for bit: codes on the grid, scales as they were."""
    import torch
    from safetensors import safe_open

    for module, weight in done.weights.items():
        scheme, codes = weight.scheme, weight.codes_RC.cpu()
        name = f"{module}.weight_packed" if scheme.is_packed else f"{module}.weight"
        with safe_open(str(folder / names[name]), framework="pt") as opened:
            found = opened.get_tensor(name)
            scale_RG = opened.get_tensor(f"{module}.weight_scale")
        if scheme.is_packed:
            found = unpack_codes(found, scheme.num_bits, codes.shape[1])
        assert torch.equal(found.to(codes.dtype), codes), f"{module}: other codes than were made"
        assert torch.equal(scale_RG, weight.scale_RG.cpu()), f"{module}: other scales"


def _build_config(plan: TargetPlan) -> dict[str, Any]:
    config = json.loads(json.dumps(plan.target.config))
    config["quantization_config"] = build_target_settings(plan)
    if plan.head is not None:  # an output layer of its own, at every level that speaks of it
        config["tie_word_embeddings"] = False
        if isinstance(config.get("text_config"), dict):
            config["text_config"]["tie_word_embeddings"] = False
    return dict(config)


def _build_record(
    plan: TargetPlan,
    done: Quantized,
    calibrated_on: Mapping[str, Any] | None,
    distilled: Mapping[str, Any] | None,
) -> dict[str, Any]:
    schemes: dict[str, int] = {}
    for scheme in plan.schemes.values():
        label = describe_scheme(scheme)
        schemes[label] = schemes.get(label, 0) + 1
    return {
        "format": "paceline-quantized/1",
        "from": plan.target.name,
        "from_fingerprint": plan.target.weights_fingerprint,
        "method": plan.method,
        "schemes": schemes,
        "head": None if plan.head is None else describe_scheme(plan.head),
        "kept": list(plan.kept),
        "rescaled": sorted(done.changed),
        "calibrated_on": None if calibrated_on is None else dict(calibrated_on),
        "output_errors": dict(done.errors),  # of rounding, before any distillation
        "distilled": None if distilled is None else dict(distilled),
        "provenance": build_provenance(),
    }
