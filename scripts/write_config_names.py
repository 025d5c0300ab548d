"""Writes src/paceline/draft/config_names.txt: every name that vLLM 0.31.0 may read off a config.

Reads the installed vLLM and transformers as text: their config classes, the models that drafts are
built of, and the code around drafting. A key of config.json with another name has no effect.
Run in an environment that has vLLM 0.31.0: python scripts/write_config_names.py [--check]
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

OUT = Path(__file__).parents[1] / "src/paceline/draft/config_names.txt"
HEAD = "# Names that vLLM 0.31.0 may read off a config. Written by scripts/write_config_names.py.\n"
_FOLDERS = (
    "config",
    "transformers_utils",
    "platforms",
    "model_executor/layers/rotary_embedding",
    "model_executor/layers/attention",
    "model_executor/model_loader",
    "v1/attention",
    "v1/spec_decode",
    "v1/worker",
    "v1/sample",
)
_FILES = (
    "engine/arg_utils.py",
    "model_executor/layers/logits_processor.py",
    "model_executor/layers/vocab_parallel_embedding.py",
    "v1/core/kv_cache_utils.py",
)
_MODELS = (
    *("adapters", "config", "interfaces", "interfaces_base", "registry", "utils"),
    *("llama", "llama_eagle3", "medusa", "qwen2", "qwen3", "qwen3_eagle3", "qwen3_dflash"),
    *("qwen3_5", "qwen3_5_mtp", "qwen3_next"),
)
# other models' own config classes and processors
_NOT = ("transformers_utils/configs/", "transformers_utils/processors/", "v1/worker/gpu/mm/")
_OWN_CONFIGS = ("eagle.py", "medusa.py", "speculators/algos.py", "speculators/base.py")
_TRANSFORMERS = (
    "configuration_utils.py",
    "modeling_rope_utils.py",
    *(f"models/{name}/configuration_{name}.py" for name in ("llama", "qwen2", "qwen3", "qwen3_5")),
)
_NAME = r"[a-z_][a-z0-9_]*"
_ATTRIBUTE = re.compile(rf"\b(?:\w*config|hf|cfg)(?:\(\))?\.({_NAME})\b")
_ASKED = re.compile(
    rf"(?:getattr|hasattr|getattr_iter)\(\s*[\w.()\[\]]+,\s*[\[(]?\s*((?:\"{_NAME}\",?\s*)+)"
)
_QUOTED = re.compile(rf"\"({_NAME})\"")
_FIELD = re.compile(rf"\bself\.({_NAME})|^    ({_NAME}):", re.MULTILINE)


def _root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed here")
    return Path(spec.origin).parent


def _list_files(vllm: Path) -> Iterator[Path]:
    for folder in _FOLDERS:
        for path in sorted((vllm / folder).rglob("*.py")):
            if not path.relative_to(vllm).as_posix().startswith(_NOT):
                yield path
    yield from (vllm / name for name in _FILES)
    yield from (vllm / "transformers_utils/configs" / name for name in _OWN_CONFIGS)
    yield from (vllm / "model_executor/models" / f"{name}.py" for name in _MODELS)


def collect_names() -> list[str]:
    """All names, sorted: attributes of configs, names asked of them, and words in quotes beside."""
    found: set[str] = set()
    for path in _list_files(_root("vllm")):
        text = path.read_text(encoding="utf-8")
        found.update(_ATTRIBUTE.findall(text))
        for names in _ASKED.findall(text):
            found.update(_QUOTED.findall(names))
        if "spec_decode" in path.parts or "transformers_utils" in path.parts:
            found.update(_QUOTED.findall(text))
    for name in _TRANSFORMERS:
        text = (_root("transformers") / name).read_text(encoding="utf-8")
        found.update(_QUOTED.findall(text))
        for one, other in _FIELD.findall(text):
            found.add(one or other)
    return sorted(name for name in found if len(name) > 1)


def main() -> None:
    text = HEAD + "\n".join(collect_names()) + "\n"
    if "--check" in sys.argv:
        raise SystemExit(0 if OUT.read_text(encoding="utf-8") == text else "out of date")
    OUT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
