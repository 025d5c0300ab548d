"""An engine on the shape of a target alone: dummy weights, synthetic acceptance, real kernels.

The target's weights are vLLM's own dummies (load_format dummy); the draft's are random numbers in a
real folder, so that what is shared with the target is decided by vLLM's loader as for any draft.
Text and acceptance of such an engine mean nothing; its step time and memory do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from paceline.draft import Draft, TensorRule, build_contract, build_mtp_config, read_draft
from paceline.errors import EngineError, PlanError
from paceline.records import storage_errors, write_json
from paceline.serve.endpoint import VllmEndpoint, launch
from paceline.serve.install import VLLM_VERSION, require_vllm
from paceline.serve.plan import Plan, build_plan
from paceline.target import TargetFacts, read_target

__all__ = [
    "ShapeDraft",
    "find_machine",
    "open_shape",
    "plan_shape",
    "write_shape_draft",
    "write_shape_target",
]

_BLOCK_ELEMENTS = 1 << 22
_ELEMENT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "F8_E4M3": 1}


@dataclass(frozen=True, kw_only=True)
class ShapeDraft:
    """A draft by shape. config: of its folder, {} for the target's own MTP head. own: tensors to
    store that vLLM would else share. kv_dtype: of its cache, "auto" for the model's."""

    family: str
    num_speculative_tokens: int
    config: dict[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    kv_dtype: str = "auto"


def find_machine(device: str) -> str:
    """ "cpu MODEL" or "cuda MODEL", without starting anything. Raises PlanError without a GPU."""
    if device == "cpu":
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return f"cpu {line.partition(':')[2].strip()}"
        return "cpu unknown"
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        raise PlanError(
            "no NVIDIA GPU answers",
            where="nvidia-smi",
            expected="a GPU, or --device cpu with a small shape",
        ) from None
    names = sorted({line.strip() for line in answer.stdout.splitlines() if line.strip()})
    return f"cuda {' + '.join(names)}"


def write_shape_target(folder: Path, facts: TargetFacts) -> TargetFacts:
    """A folder with the target's config.json alone, as facts that a plan takes.

    Without M-RoPE: a text's positions are the same in all its parts, so the rotation is the plain
    one; and with it the CPU build's engine of a text-only class died while generating.
    """
    config = {key: value for key, value in facts.config.items() if not key.startswith("_")}
    levels = [config]
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = dict(config["text_config"])
        levels.append(config["text_config"])
    for level in levels:
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(level.get(key), dict):
                level[key] = {k: v for k, v in level[key].items() if not k.startswith("mrope")}
    write_json(folder / "config.json", config)
    return dataclasses.replace(read_target(folder, require_weights=False), name=facts.name)


def write_shape_draft(folder: Path, draft: ShapeDraft) -> Draft:
    """A sound draft folder full of small random numbers. Raises DraftError where vLLM has no such
    draft, StorageError when the disk refuses."""
    spec = {
        "family": draft.family,
        "num_speculative_tokens": draft.num_speculative_tokens,
    }
    write_json(folder / "spec.json", spec)
    write_json(folder / "metadata.json", {"name": "by shape, not trained"})
    write_json(folder / "config.json", draft.config)
    contract = build_contract(draft.family, draft.config)
    plain = {
        name: rule
        for name, rule in contract.tensors.items()
        if (rule.required or name in draft.own) and not rule.unread
    }
    packed = {
        f"{name.removesuffix('weight')}weight_scale"
        for name, rule in plain.items()
        if rule.is_linear and not name.endswith("lm_head.weight")
    }
    if draft.config.get("quantization_config"):
        rules = contract.rules_for(packed)
        plain = {n: r for n, r in rules.items() if n in plain or n not in contract.tensors}
    _write_safetensors(folder / "model.safetensors", plain, contract.tensors)
    return read_draft(folder)


def _write_safetensors(path: Path, rules: dict[str, TensorRule], plain: Any) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, rule in sorted(rules.items()):
        dtype = _choose_dtype(name, rules)
        size = _ELEMENT_BYTES[dtype]
        for length in rule.shape:
            size *= length
        header[name] = {
            "dtype": dtype,
            "shape": list(rule.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blocks = _random_blocks()
    with storage_errors(path), open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if name.endswith("weight_shape"):  # of the layer before it was packed
                rows, columns = plain[f"{name.removesuffix('_shape')}"].shape
                file.write(numpy.array([rows, columns], dtype="<i8").tobytes())
                continue
            block, left = blocks[entry["dtype"]], end - start
            while left:
                file.write(block[: min(left, len(block))])
                left -= min(left, len(block))


def _choose_dtype(name: str, rules: dict[str, TensorRule]) -> str:
    """bf16 where that may be; the scales of an FP8 layer are float32."""
    dtypes = rules[name].dtypes
    if name.endswith("weight_scale") and f"{name.removesuffix('_scale')}" in rules:
        return "F32"
    return "BF16" if "BF16" in dtypes else dtypes[0]


def _random_blocks() -> dict[str, bytes]:
    """A few megabytes of each kind; a zero would let a GPU draw less power than it does in use."""
    dice = numpy.random.default_rng(0)
    values = dice.standard_normal(_BLOCK_ELEMENTS).astype("<f4") * 0.02
    half = (values.view("<u4") >> 16).astype("<u2").tobytes()
    whole = dice.integers(-(2**31), 2**31, _BLOCK_ELEMENTS, dtype="<i8").astype("<i4").tobytes()
    return {
        "BF16": half,
        "F16": values.astype("<f2").tobytes(),
        "F32": numpy.abs(values).tobytes(),
        "I32": whole,
        "I64": bytes(8 * _BLOCK_ELEMENTS),  # d2t: the first ids
        "F8_E4M3": dice.integers(0, 0x38, _BLOCK_ELEMENTS, dtype="u1").tobytes(),
    }


def plan_shape(
    folder: Path,
    target: TargetFacts,
    draft: ShapeDraft | None,
    *,
    acceptance_length: float | None,
    device: str,
    max_model_len: int,
    kv_cache_bytes: int,
    enforce_eager: bool | None = None,
    num_threads: int | None = None,
) -> Plan:
    """The plan of one engine by shape; target and draft are written into `folder`.

    acceptance_length: bonus token included, between 1 and K + 1; None without a draft and on a CPU,
    where vLLM cannot be told. kv_cache_bytes: of the pool, stated, so that two engines fit one
    device. Raises PlanError for what does not go together, and what writing a draft raises.
    """
    decreed = draft is not None and device == "cuda"
    if decreed != (acceptance_length is not None):
        raise PlanError(
            f"the acceptance length is {acceptance_length}",
            where=f"device {device}, {'no draft' if draft is None else draft.family}",
            expected="one with a draft on CUDA, none elsewhere: vLLM's CPU sampler has no synthetic"
            " acceptance",
        )
    if draft is not None and acceptance_length is not None:
        k = draft.num_speculative_tokens
        if not 1 <= acceptance_length <= k + 1:
            raise PlanError(
                f"the acceptance length is {acceptance_length:g} with K = {k}",
                expected=f"1 to {k + 1}",
            )
    facts = write_shape_target(folder / "target", target)
    served = None if draft is None else _make_draft(folder / "draft", draft, facts)
    plan = build_plan(
        facts,
        served,
        device=device,
        max_model_len=max_model_len,
        enforce_eager=enforce_eager,
        kv_cache_bytes=kv_cache_bytes,
        max_num_seqs=1,
        num_threads=num_threads,
    )
    return _by_shape(plan, draft, acceptance_length)


@contextlib.contextmanager
def open_shape(
    target: TargetFacts,
    draft: ShapeDraft | None,
    *,
    log_path: str | Path,
    device: str,
    **settings: Any,
) -> Iterator[VllmEndpoint]:
    """One started engine on the shape; ended, with its folders, when the block ends.

    settings: of `plan_shape`. Raises PlanError before anything starts, EngineError afterwards.
    """
    require_vllm(device)
    work = Path(tempfile.mkdtemp(prefix="paceline-shape-"))
    try:
        plan = plan_shape(work, target, draft, device=device, **settings)
        with launch(plan, log_path=log_path) as endpoint:
            if endpoint.facts.vllm_version.partition("+")[0] != VLLM_VERSION:
                raise EngineError(
                    f"vLLM {endpoint.facts.vllm_version} answered", expected=VLLM_VERSION
                )
            yield endpoint
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make_draft(folder: Path, draft: ShapeDraft, target: TargetFacts) -> Draft:
    if draft.config or draft.family in ("ngram", "suffix"):
        return write_shape_draft(folder, draft)
    spec = {"family": draft.family, "num_speculative_tokens": draft.num_speculative_tokens}
    return Draft(
        path=target.path,
        family=draft.family,
        num_speculative_tokens=draft.num_speculative_tokens,
        config=build_mtp_config(target),
        spec=spec,
        metadata={"name": f"native MTP head of {target.name}, by shape"},
        headers={},
        tensors={},
        tensor_files={},
        files_bytes=0,
        num_parameters=0,
        sha256="",
        is_native=True,
    )


def _by_shape(plan: Plan, draft: ShapeDraft | None, acceptance_length: float | None) -> Plan:
    """The plan with dummy weights, a pool of its own size, and acceptance by decree."""
    args = {**plan.engine_args, "load_format": "dummy"}
    if draft is not None:
        speculative = dict(args["speculative_config"])
        if acceptance_length is not None:
            speculative["rejection_sample_method"] = "synthetic"
            speculative["synthetic_acceptance_length"] = acceptance_length
        if draft.kv_dtype != "auto":
            speculative["kv_cache_dtype"] = draft.kv_dtype
        args["speculative_config"] = speculative
    return dataclasses.replace(plan, engine_args=args)
