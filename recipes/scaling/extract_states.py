"""Stored states by vLLM on a GPU (its `extract_hidden_states`), as `paceline data states` has them.

    python recipes/scaling/extract_states.py DATA --target smollm2 --out STATES --layers 2 15 27

vLLM 0.31.0 reads each row as a prompt and its ExampleHiddenStatesConnector saves the layers asked
for; it needs CUDA streams and events, so a CPU cannot run it (`paceline data states` can). The last
layer's stream is asked for too, and the target's final norm is applied to it here. The price is
told first and refused where the disk cannot hold it; an unfinished folder goes on. The first rows
are also read through transformers, and how far the two differ is printed. `--num-gpus N`: that many
engines of vLLM's own data parallelism. No network.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.data import Row, StatesPlan, read_rows
from paceline.errors import DataError
from paceline.target import read_target
from paceline.train.features import FrozenTarget, load_frozen_target
from paceline.train.stored import StatesRun, store_states


def build_engine(args: argparse.Namespace, folder: Path) -> Any:
    from vllm import LLM

    layers = [*args.layers, args.target.num_hidden_layers]
    return LLM(
        model=str(args.target.path),
        dtype="bfloat16",
        load_format="safetensors",
        max_model_len=args.max_length + 8,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        data_parallel_size=args.num_gpus,
        gpu_memory_utilization=0.6,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    )


def run_with(args: argparse.Namespace, frozen: FrozenTarget, folder: Path) -> StatesRun:
    from vllm import SamplingParams

    engine = build_engine(args, folder)
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def run(rows: Sequence[Row]) -> Iterator[Tensor]:
        for at in range(0, len(rows), args.chunk):
            part = rows[at : at + args.chunk]
            asked = [list(row.input_ids[: args.max_length]) for row in part]
            inputs = [{"prompt_token_ids": ids} for ids in asked]
            outputs = engine.generate(inputs, params, use_tqdm=False)
            for row, ids, output in zip(part, asked, outputs, strict=True):
                path = Path(output.kv_transfer_params["hidden_states_path"])
                found = load_file(str(path))
                path.unlink()
                if found["token_ids"][: len(ids)].tolist() != ids:
                    raise DataError(f"vLLM saved other tokens for row '{row.row_id}'")
                layers = found["hidden_states"][: len(ids)].to(frozen.head_VD.device)
                final = frozen.backbone.norm(layers[:, -1])
                yield torch.cat([layers[:, :-1].flatten(1), final], -1)

    return run


def compare(
    args: argparse.Namespace, frozen: FrozenTarget, run: StatesRun, rows: list[Row]
) -> None:
    """Largest difference of any value, beside the largest value, over a few rows."""
    for row, states in zip(rows, run(rows), strict=True):
        ids = torch.tensor([row.input_ids[: args.max_length]], device=states.device)
        found = frozen.features(ids, args.layers)
        wanted = torch.cat([found.taps_BTF, found.final_BTD], -1)[0]
        far = (states.float() - wanted.float()).abs().max()
        print(f"row {row.row_id}: off by at most {far:.3g} of {wanted.abs().max():.3g}")


def tell(plan: StatesPlan, to_come: int) -> None:
    tokens = sum(plan.lengths)
    print(f"{tokens:,} tokens, {plan.num_bytes / 1e9:.2f} GB; {to_come / 1e9:.2f} GB to come")


def show(done: int, total: int) -> None:
    if done % 500 == 0 or done == total:
        print(f"{done}/{total}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--target", required=True, type=read_target)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--layers", required=True, nargs="+", type=int)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=512, help="rows asked at once")
    parser.add_argument("--num-gpus", type=int, default=1)
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="extract-", dir=args.out.absolute().parent))
    opened: list[StatesRun] = []

    def run(rows: Sequence[Row]) -> Iterator[Tensor]:
        if not opened:
            frozen = load_frozen_target(args.target, device="cuda", dtype=torch.bfloat16)
            opened.append(run_with(args, frozen, scratch))
            compare(args, frozen, opened[0], read_rows(args.data)[:4])
        yield from opened[0](rows)

    try:
        store_states(
            args.data,
            target=args.target,
            out_dir=args.out,
            aux_layer_ids=args.layers,
            max_length=args.max_length,
            run=run,
            on_plan=tell,
            on_progress=show,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
