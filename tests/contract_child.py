"""Child process: loads draft folders with vLLM's own loader on the CPU, without an engine.

asked.json: [{target, draft, settings, weights}]; answers.json: for each, the error of the folder as
it is and of each weights file in its place; null where vLLM loaded it without complaint.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import set_current_vllm_config
from vllm.config.utils import replace
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model


def build_config(case: dict[str, Any]) -> Any:
    return EngineArgs(
        model=case["target"],
        dtype="bfloat16",
        max_model_len=1024,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        speculative_config={"model": case["draft"], **case["settings"]},
    ).create_engine_config()


def load(config: Any, method: str) -> None:
    """As the proposer of the method loads its model."""
    config.compilation_config.static_forward_context.clear()
    draft = config.speculative_config.draft_model_config
    if method == "draft_model":
        config = replace(config, quant_config=None, model_config=draft)
    with set_current_vllm_config(config):
        get_model(vllm_config=config, model_config=draft)


def answer(case: dict[str, Any]) -> list[str | None]:
    files = [None, *case["weights"]]
    place = Path(case["draft"]) / "model.safetensors"
    try:
        config = build_config(case)
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:300]}"] * len(files)
    if not torch.distributed.is_initialized():
        with set_current_vllm_config(config):
            meeting = f"file://{sys.argv[2]}.rendezvous"
            init_distributed_environment(1, 0, meeting, 0, "gloo")
            initialize_model_parallel(1, 1)
    errors: list[str | None] = []
    for file in files:
        if file is not None:
            shutil.copyfile(file, place)
        try:
            load(config, case["settings"]["method"])
        except Exception as error:
            errors.append(f"{type(error).__name__}: {str(error)[:300]}")
        else:
            errors.append(None)
    return errors


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([answer(case) for case in cases]))


if __name__ == "__main__":
    main()
