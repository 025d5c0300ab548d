"""Which kernel vLLM runs each quantised target with, and whether it holds what was written.

    python bench/quantized_targets.py pocket smollm2 [--data pocket=DATA ...] [--device cuda]

For each target: W4A16 by AWQ and GPTQ in groups of 32 and of as many as fit up to 128, W8A8 with
its head in W8A16 or W8A8, W8A16, FP8; recurrent layers in W8A8 beside 4 bits. Without a data folder
of the target (`paceline data answer`) every weight is rounded on its own. Each is started, its
kernels named, every matrix read back out of the engine and compared bit for bit, and the nats a
token of the original's own answers told. What a device has no kernel for is named with the reason.
On two cores 20 s a target. Figures go to bench/results/quantized-targets-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.data import Row, build_requests, read_prompts, read_rows
from paceline.draft import Scheme, find_cpu_kernel
from paceline.endpoint import Answer, Sampling
from paceline.errors import PacelineError
from paceline.quantize import (
    choose_rows,
    choose_scheme,
    describe_scheme,
    plan_target,
    round_target,
    write_target,
)
from paceline.records import build_provenance, write_json
from paceline.serve import (
    VllmEndpoint,
    build_plan,
    check_plan,
    find_altered_weights,
    find_device,
    start,
    with_applied_weights,
)
from paceline.target import TargetFacts, read_target

HERE = Path(__file__).resolve().parent
NUM_ROWS, MAX_LENGTH = 24, 256
NUM_PROMPTS, NUM_TOKENS = 12, 48
# body, its group size, head, method where there is data
CASES: tuple[tuple[str, int | None, str | None, str], ...] = (
    ("w4a16", 32, None, "awq"),
    ("w4a16", 32, None, "gptq"),
    ("w4a16", 128, "w8a16", "gptq"),
    ("w8a16", None, None, "gptq"),
    ("w8a8", None, "w8a16", "gptq"),
    ("w8a8", None, "w8a8", "gptq"),
    ("fp8", None, None, "gptq"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--data", action="append", default=[], metavar="TARGET=FOLDER")
    parser.add_argument("--device", default=find_device())
    options = parser.parse_args()
    folders = dict(word.split("=", 1) for word in options.data)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.targets:
            rows = read_rows(Path(folders[name])) if name in folders else []
            chosen = choose_rows(rows, NUM_ROWS, MAX_LENGTH) if rows else []
            place = Path(scratch) / name.replace("/", "-")
            found[name] = measure_target(read_target(name), chosen, place, options.device)
    command = ["bench/quantized_targets.py", *options.targets]  # whose rows, not where they lie
    provenance = {**build_provenance(seed=0), "command": command}
    out = HERE / "results" / f"quantized-targets-{options.device}.json"
    write_json(out, {"provenance": provenance, "targets": found})


def measure_target(
    target: TargetFacts, rows: Sequence[Row], place: Path, device: str
) -> list[dict[str, Any]]:
    prompts = read_prompts("demo-eval").prompts[:NUM_PROMPTS]
    thinking = "off" if target.is_hybrid else "none"
    requests = build_requests(prompts, target, Sampling(max_tokens=NUM_TOKENS), thinking=thinking)
    with start(build_plan(target, device=device), log_path=place / "engine.log") as endpoint:
        answers = endpoint.generate(requests, concurrency=4)
        kernels = endpoint.kernels()["target"]
        nats = read_nats(endpoint, answers)
    records: list[dict[str, Any]] = [{"body": "bf16", "kernels": kernels, "nats_a_token": nats}]
    for number, case in enumerate(CASES):
        folder = place / str(number)
        try:
            record = measure_case(target, case, rows, answers, folder, device)
        except PacelineError as problem:
            record = {"body": case[0], "head": case[2], "refused": str(problem).partition("\n")[0]}
        print(json.dumps(record), flush=True)
        records.append(record)
    return records


def measure_case(
    target: TargetFacts,
    case: tuple[str, int | None, str | None, str],
    rows: Sequence[Row],
    answers: Sequence[Answer],
    folder: Path,
    device: str,
) -> dict[str, Any]:
    name, wanted, head_name, method = case
    body = choose_scheme(name, None if wanted is None else fit_group(wanted, target))
    head = None if head_name is None else choose_scheme(head_name)
    for scheme in (body, head):
        if scheme is not None and device == "cpu" and find_cpu_kernel(scheme) is None:
            refused = "vLLM 0.31.0's CPU build has no kernel for w8a16"
            return {"body": name, "head": head_name, "refused": refused}
    plan = plan_target(
        target,
        body,
        method=method if rows else "rtn",
        recurrent=choose_recurrent(target, body),
        head=head,
    )
    made = round_target(plan, folder, rows=rows, where="rows", device=device)
    small = write_target(plan, made, folder)
    engine = with_applied_weights(build_plan(small, device=device))
    check_plan(engine)
    with start(engine, log_path=folder.with_suffix(".log")) as endpoint:
        kernels = endpoint.kernels()["target"]
        same, altered = find_altered_weights(endpoint, small.path)
        nats = read_nats(endpoint, answers)
    return {
        "body": describe_scheme(body),
        "head": head_name,
        "method": plan.method,
        "bytes": sum(file.stat().st_size for file in small.path.glob("*.safetensors")),
        "kernels": kernels,
        "same_in_engine": same,
        "altered_in_engine": altered,
        "nats_a_token": nats,
    }


def read_nats(endpoint: VllmEndpoint, answers: Sequence[Answer]) -> float:
    """Of the original's own answers, greedy."""
    read = endpoint.text_logprobs([(a.prompt_ids, a.output_ids) for a in answers])
    return -sum(map(sum, read)) / sum(map(len, read))


def choose_recurrent(target: TargetFacts, body: Scheme) -> Scheme | None:
    if not target.is_hybrid:
        return None
    return choose_scheme("w8a8") if body.num_bits == 4 else body


def fit_group(wanted: int, target: TargetFacts) -> int:
    """The largest group up to `wanted` that divides the inputs of every matrix."""
    sizes = (target.hidden_size, target.intermediate_size)
    return next(s for s in (128, 64, 32) if s <= wanted and not any(size % s for size in sizes))


if __name__ == "__main__":
    main()
