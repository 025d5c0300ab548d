"""Draft memory that a started engine reports, against the forecast, on the caches of Qwen shapes.

    python bench/engine_memory.py [--shape qwen3.5-4b] [--k 1 2 3 4 5 6 7] [--out FILE]

pocket is taken as it is. Of a Qwen shape the engine is started with its layers, heads, head sizes
and recurrent states as they are, and width, MLP and vocabulary made small, so that the weights fit
any machine: caches do not depend on those three. Its native MTP head is the draft. Prints, for each
K, the bytes of keys and values and of states at 16,384 tokens by the engine, by the forecast for
the small shape, and by the forecast for the whole shape; all three must be the same. One JSON
object at the end.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from paceline.forecast import (
    CachePlan,
    DraftMemory,
    TargetShape,
    list_shapes,
    measure_memory,
    parse_design,
    read_shape,
)
from paceline.forecast.measured_record import shape_as_run
from paceline.records import build_provenance, write_json
from paceline.serve import ShapeDraft, open_shape

CONTEXT = 16_384
SMALL = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 1024}


def make_small(shape: TargetShape, folder: Path) -> TargetShape:
    """The shape with the caches it has and little else."""
    config = dict(shape.facts.config)
    inner = dict(config["text_config"]) if "text_config" in config else None
    (config if inner is None else inner).update(SMALL)
    if inner is not None:
        config["text_config"] = inner
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


def foresee(shape: TargetShape, k: int) -> DraftMemory:
    shape = shape_as_run(shape)
    design = parse_design(f'family = "mtp"\nnum_speculative_tokens = {k}\n', shape)
    return measure_memory(design, shape, context_tokens=CONTEXT, plan=CachePlan(device="cpu"))


def ask_engine(shape: TargetShape, k: int, log_path: Path) -> Any:
    draft = ShapeDraft(family="mtp", num_speculative_tokens=k, config={}, own=(), kv_dtype="auto")
    with open_shape(
        shape.facts,
        draft,
        acceptance_length=None,
        device="cpu",
        max_model_len=256,  # shorter than an attention block of either
        kv_cache_bytes=3 * 2**30,
        log_path=log_path,
    ) as endpoint:
        return endpoint.memory(context_tokens=CONTEXT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", action="append", choices=("pocket", *list_shapes()))
    parser.add_argument("--k", nargs="+", type=int, default=list(range(1, 8)))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for name in args.shape or ("pocket", *list_shapes()):
            whole = read_shape(name)
            small = whole if name == "pocket" else make_small(whole, Path(work, name))
            for k in args.k:
                engine = ask_engine(small, k, Path(work, f"{name}-{k}.log"))
                found = [(m.kv_bytes, m.state_bytes) for m in (engine, foresee(small, k))]
                found.append((foresee(whole, k).kv_bytes, foresee(whole, k).state_bytes))
                own = engine.total_bytes, foresee(small, k).total_bytes
                row = {"shape": name, "k": k, "kv_and_state": found[0], "total": own}
                rows.append({**row, "equal": len(set(found)) == 1 and own[0] == own[1]})
                print(json.dumps({**rows[-1], "all": found}), flush=True)
    result = {"rows": rows, "equal": all(row["equal"] for row in rows)}
    if args.out:
        write_json(args.out, {**result, "provenance": build_provenance()})
    print(json.dumps({"rows": len(rows), "equal": result["equal"]}))


if __name__ == "__main__":
    main()
