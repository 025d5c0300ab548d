"""Child process: loads draft folders with vLLM's own loader on the CPU, without an engine.

asked.json: [{target, draft, settings, weights, configs, folders}]; answers.json: for each,
{"weights": the error of the folder as it is and of each weights file in its place, "configs": that
of each config.json in its place, "folders": that of other folders instead of it}; null where vLLM
loaded the same model without complaint, "another" where what it built differs.
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
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config


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


def load(config: Any, method: str) -> torch.nn.Module:
    """As the proposer of the method loads its model."""
    config.compilation_config.static_forward_context.clear()
    draft = config.speculative_config.draft_model_config
    if method == "draft_model":
        config = replace(config, quant_config=None, model_config=draft)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config, model_config=draft)


def describe(config: Any, model: torch.nn.Module) -> str:
    """Everything scalar about what was built: shapes, sizes, epsilons, rotary bases, branches."""
    spec = config.speculative_config
    facts: list[Any] = [
        spec.method,
        spec.num_speculative_tokens,
        get_eagle3_aux_layers_from_config(spec),
        [(name, list(value.shape)) for name, value in model.named_parameters()],
    ]
    hf_config = spec.draft_model_config.hf_config
    facts.append(
        (getattr(hf_config, "dflash_config", None) or {}).get("mask_token_id")
        or getattr(hf_config, "mask_token_id", None)
        or getattr(hf_config, "pard_token", None)
    )
    for name, module in model.named_modules():
        for key, value in sorted(vars(module).items()):
            if isinstance(value, (bool, int, float, str)):
                facts.append([name, key, value])
            elif callable(value) and hasattr(value, "__name__"):
                facts.append([name, key, value.__name__])
    return json.dumps(facts, default=str)


def answer(case: dict[str, Any]) -> dict[str, list[str | None]]:
    place = Path(case["draft"])
    sound = {name: place / name for name in ("model.safetensors", "config.json")}
    kept = {name: path.read_bytes() for name, path in sound.items() if path.is_file()}
    built: list[str] = []

    def attempt(**changes: Any) -> str | None:
        try:
            config = build_config({**case, **changes})
            join(config)
            found = describe(config, load(config, case["settings"]["method"]))
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:300]}"
        built.append(found)
        return None if found == built[0] else "another"

    errors = {"weights": [attempt()], "configs": []}
    for kind, name in (("weights", "model.safetensors"), ("configs", "config.json")):
        for file in case[kind]:
            shutil.copyfile(file, sound[name])
            errors[kind].append(attempt())
        if name in kept:
            sound[name].write_bytes(kept[name])
    errors["folders"] = [attempt(draft=folder) for folder in case["folders"]]
    return errors


def join(config: Any) -> None:
    if not torch.distributed.is_initialized():
        with set_current_vllm_config(config):
            meeting = f"file://{sys.argv[2]}.rendezvous"
            init_distributed_environment(1, 0, meeting, 0, "gloo")
            initialize_model_parallel(1, 1)


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([answer(case) for case in cases]))


if __name__ == "__main__":
    main()
