"""Rules of decoder layers, whatever family they draft for: heads, layer types, dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.problems import show_value
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding

__all__ = ["check_decoder", "check_dtype"]

_FILE = "config.json"
# A whole model may have as many as the table of contracts counts; other drafts have a few.
_MAX_LAYERS = {"draft_model": 64}
_FEW_LAYERS = 16
_TORCH_DTYPES = (
    *("float64", "double", "float", "half", "int8", "uint8", "int16", "int32", "int64", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_decoder(case: Case) -> Iterator[Finding]:
    """`cfg.heads`, `cfg.layers` and `cfg.dtype` of a draft with layers of its own."""
    if case.contract is None or case.contract.sizes is None:
        return
    numbers = case.contract.sizes.numbers
    if "head_dim" in numbers:
        yield from _check_heads(numbers, case)
        yield from _check_layers(case, numbers["num_hidden_layers"])
    yield from check_dtype(case)


def _check_heads(numbers: Mapping[str, int], case: Case) -> Iterator[Finding]:
    hidden, head_dim = numbers["hidden_size"], numbers["head_dim"]
    heads, kv_heads = numbers["num_attention_heads"], numbers["num_key_value_heads"]
    # transformers' LlamaConfig refuses it; Qwen's does not, nor does an envelope pass through one
    if hidden % heads and case.config.get("model_type") == "llama" and case.scan.envelope is None:
        yield finding(
            "cfg.heads",
            _FILE,
            f"hidden_size {hidden} is not a multiple of {heads} attention heads; vLLM"
            " stops at such a config, head_dim or not",
            where="num_attention_heads",
            found=heads,
            expected=f"a divisor of {hidden}",
            fix="Train with a number of heads that divides hidden_size.",
        )
    if heads % kv_heads:
        yield finding(
            "cfg.heads",
            _FILE,
            f"{heads} attention heads cannot share {kv_heads} key-value heads",
            where="num_key_value_heads",
            found=kv_heads,
            expected=f"a divisor of {heads}",
            fix="State the numbers that the weights were trained with.",
        )
    if head_dim % 2:
        yield finding(
            "cfg.heads",
            _FILE,
            "an odd head size cannot be rotated",
            where="head_dim",
            found=head_dim,
            expected="an even number",
            fix="State head_dim; without it vLLM takes hidden_size / num_attention_heads.",
        )
    elif head_dim not in _CPU_HEAD_SIZES:
        yield finding(
            "cfg.heads",
            _FILE,
            f"head size {head_dim} does not run on vLLM 0.31.0's CPU attention",
            where="head_dim",
            found=head_dim,
            expected=", ".join(map(str, _CPU_HEAD_SIZES)),
            fix="Fine on a GPU whose attention has it.",
            severity="note",
        )


def _check_layers(case: Case, layers: int) -> Iterator[Finding]:
    config = case.config
    most = _MAX_LAYERS.get(case.family or "", _FEW_LAYERS)
    if layers > most:
        yield finding(
            "cfg.layers",
            _FILE,
            f"{layers} draft layers are not a draft",
            where="num_hidden_layers",
            found=layers,
            expected=f"1 to {most}",
            fix="A draft on the target's state usually has one layer.",
        )
    types = config.get("layer_types")
    slides = isinstance(types, list) and "sliding_attention" in types
    if isinstance(types, list) and (
        len(types) != layers
        or not all(kind in ("full_attention", "sliding_attention") for kind in types)
    ):
        yield finding(
            "cfg.layers",
            _FILE,
            "layer_types does not describe the draft's layers",
            where="layer_types",
            found=types,
            expected=f"{layers} of full_attention or sliding_attention",
            fix="Remove it, or give one entry a draft layer (not one a target layer).",
        )
    window = config.get("sliding_window")
    is_qwen = case.config.get("model_type") in ("qwen2", "qwen3") and case.scan.envelope is None
    if case.family == "dflash":
        yield from _check_dflash_window(case, slides)
    elif slides and not (isinstance(window, int) and window >= 1):
        by_default = window is None and is_qwen
        yield finding(
            "cfg.layers",
            _FILE,
            "a sliding layer states no window; vLLM takes 4,096"
            if by_default
            else "a sliding layer needs a window",
            where="sliding_window",
            found=window,
            expected="a whole number of at least 1",
            fix="State sliding_window.",
            severity="warning" if by_default else None,
        )
    elif window is not None and not slides:
        yield finding(
            "cfg.layers",
            _FILE,
            "sliding_window has no effect without a sliding layer in layer_types",
            where="sliding_window",
            found=window,
            expected="no key",
            fix="Remove it, or name the sliding layers in layer_types.",
            severity="warning",
        )


def _check_dflash_window(case: Case, slides: bool) -> Iterator[Finding]:
    """DFlash has a window of its own; the plain one is Qwen's, dropped without its switch."""
    config, inner = case.config, case.config.get("dflash_config")
    own = inner if isinstance(inner, dict) else {}
    windows = [own.get("swa_window_size")]
    if config.get("use_sliding_window") is True:
        windows.append(config.get("sliding_window"))
    if (slides or own.get("use_swa") is True) and not any(
        isinstance(window, int) and window >= 1 for window in windows
    ):
        yield finding(
            "cfg.layers",
            _FILE,
            "a sliding layer has no window that vLLM 0.31.0 finds, and it stops",
            where="dflash_config.swa_window_size",
            found=config.get("sliding_window"),
            expected="swa_window_size, or sliding_window with use_sliding_window true",
            fix="State swa_window_size in dflash_config.",
        )


def check_dtype(case: Case) -> Iterator[Finding]:
    config, target = case.config, case.target
    dtype = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(dtype, str):
        return
    name = dtype.removeprefix("torch.")
    if name != dtype:
        yield finding(
            "cfg.dtype",
            _FILE,
            f"'{show_value(dtype)}' stops vLLM while it loads: the name has no 'torch.'",
            where="dtype",
            found=dtype,
            expected="bfloat16",
            fix=f'Write "{show_value(name)}".',
        )
    if name == "float32":
        yield finding(
            "cfg.dtype",
            _FILE,
            "float32 weights double the files; vLLM casts them to the target's dtype",
            where="dtype",
            found=dtype,
            expected="bfloat16",
            fix="Save the weights as bfloat16.",
            severity="warning",
        )
    elif name not in ("bfloat16", "float16"):
        known = name in _TORCH_DTYPES
        yield finding(
            "cfg.dtype",
            _FILE,
            f"{name} has no effect: the files' own dtypes count, and vLLM runs the draft in the"
            " target's"
            if known
            else "is not a dtype, and vLLM stops at it",
            where="dtype",
            found=dtype,
            expected="bfloat16 or float16",
            fix="Write bfloat16.",
            severity="warning" if known else None,
        )
    elif target is not None and target.dtype in ("bfloat16", "float16") and name != target.dtype:
        yield finding(
            "cfg.dtype",
            _FILE,
            f"the draft is {name}, the target {target.dtype}; vLLM runs the draft in the target's"
            " dtype",
            where="dtype",
            found=dtype,
            expected=target.dtype,
            fix="Train or cast, then measure in the target's dtype; --deep looks for overflow.",
            severity="warning",
        )
