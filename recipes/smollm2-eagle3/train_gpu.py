"""Makes the bundled reference draft on one GPU: answers, training, acceptance. No network.

    python recipes/smollm2-eagle3/train_gpu.py --target FOLDER --out OUT               # all stages
    python recipes/smollm2-eagle3/train_gpu.py --target FOLDER --out OUT --stage answer --minutes 5
    python recipes/smollm2-eagle3/train_gpu.py --target FOLDER --out OUT --stage train --minutes 8
    python recipes/smollm2-eagle3/train_gpu.py --target FOLDER --out OUT --stage eval

`--stage train --resume` goes on from the last checkpoint of a train stage that was cut off.

Small enough to try without a GPU (three minutes):

    python recipes/smollm2-eagle3/train_gpu.py --target FOLDER --out OUT --work WORK --tiny

Stages hand over in --work: `data/` (a data folder), then `draft/`; OUT gets draft/ and log.json.

Training texts: the bundled training prompts, and prompts that the target asks itself (it is given
its template up to the user's words and writes them); both answered by the target, most greedily
(that is what is measured), some at a temperature. Prompts that share eight words in a row with a
held-out prompt are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.acceptance import build_acceptance
from paceline.data import Prompt, contamination, open_tokenizer, read_prompts
from paceline.draft import read_draft
from paceline.records import append_jsonl, build_provenance, sha256_file, write_json
from paceline.target import TargetFacts, read_target
from paceline.train import Recipe, read_recipe, replay_draft, train_draft
from paceline.train.entry import simulate_draft
from paceline.train.setup import with_num_steps

HERE = Path(__file__).resolve().parent
MARK = "\u2063mark\u2063"


@dataclass(frozen=True, kw_only=True)
class Job:
    row_id: str
    category: str
    prompt_ids: tuple[int, ...]
    temperature: float


def build_engine(args: argparse.Namespace, **extra: Any) -> Any:
    """vLLM in this process; ids in, ids out."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": str(args.target.path),
        "dtype": "bfloat16",
        "load_format": "safetensors",
        "generation_config": "vllm",
        "max_model_len": 1024,
        "max_num_seqs": args.num_seqs,
        "enforce_eager": args.eager,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "seed": 0,
        **extra,
    }
    if args.tiny:
        settings["kv_cache_memory_bytes"] = 256 * 2**20
    return LLM(**settings)


def sampling(args: argparse.Namespace, temperature: float, max_tokens: int) -> Any:
    """No seed a request: vLLM then draws row by row, many times slower; the engine has one."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=list(args.target.eos_token_ids),
        detokenize=False,
    )


def generate(llm: Any, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
    inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
    return [output.outputs[0] for output in llm.generate(inputs, params, use_tqdm=False)]


def ask_itself(llm: Any, args: argparse.Namespace, num: int) -> list[Prompt]:
    """Prompts the target writes in the user's place."""
    tokenizer = open_tokenizer(args.target)
    text = tokenizer.render([{"role": "user", "content": MARK}], ask=False)
    start = tokenizer.encode(text[: text.index(MARK)])
    params = sampling(args, 1.0, 96)
    ends = set(args.target.eos_token_ids)
    prompts: dict[str, Prompt] = {}
    for number, output in enumerate(generate(llm, [start] * num, params)):
        ids = list(output.token_ids)
        if not ids or ids[-1] not in ends:
            continue
        words = tokenizer.decode(ids[:-1]).strip()
        if 8 <= len(words) <= 500 and not any(s in words for s in tokenizer.special_texts):
            messages = ({"role": "user", "content": words},)
            prompts.setdefault(
                words,
                Prompt(prompt_id=f"self-{number}", category="self", messages=messages, line=number),
            )
    return list(prompts.values())


def answer_held_out(llm: Any, args: argparse.Namespace) -> None:
    """Greedy answers to measure a draft on before it is served; never trained on."""
    tokenizer = open_tokenizer(args.target)
    prompts = read_prompts("held-out").prompts[: args.num_eval]
    asked = [tokenizer.encode_prompt(prompt.messages) for prompt in prompts]
    outputs = generate(llm, asked, sampling(args, 0.0, args.max_tokens))
    texts = [[list(ids), list(out.token_ids)] for ids, out in zip(asked, outputs, strict=True)]
    write_json(args.work / "held_out.json", {"texts": texts})


def build_jobs(
    prompts: Sequence[Prompt], target: TargetFacts, *, max_prompt: int, sampled_share: float
) -> list[Job]:
    """One job a prompt, a share of them sampled in place of greedy; shuffled, always the same."""
    held_out = read_prompts("held-out").prompts
    leaked = {overlap.training_id for overlap in contamination(list(prompts), held_out)}
    print(f"{len(leaked)} prompts share eight words in a row with a held-out one: left out")
    tokenizer = open_tokenizer(target)
    draw = random.Random("jobs")
    jobs = []
    for prompt in prompts:
        ids = tokenizer.encode_prompt(prompt.messages)
        if prompt.prompt_id in leaked or len(ids) > max_prompt:
            continue
        warm = draw.random() < sampled_share
        jobs.append(
            Job(
                row_id=f"{prompt.prompt_id}{'-t' if warm else '-g'}",
                category=prompt.category,
                prompt_ids=tuple(ids),
                temperature=draw.choice((0.5, 0.8, 1.0)) if warm else 0.0,
            )
        )
    draw.shuffle(jobs)
    return jobs


def answer(args: argparse.Namespace) -> dict[str, Any]:
    """Stage 1: a data folder of the target's own answers, cut off by the clock."""
    folder = args.work / "data"
    shutil.rmtree(folder, ignore_errors=True)
    llm = build_engine(args)
    began = time.monotonic()
    answer_held_out(llm, args)
    own = ask_itself(llm, args, args.num_self)
    print(f"{len(own)} usable prompts asked by the target itself, {time.monotonic() - began:.0f} s")
    prompts = [*read_prompts(f"train:{args.num_prompts}").prompts, *own]
    jobs = build_jobs(
        prompts, args.target, max_prompt=args.max_prompt, sampled_share=args.sampled_share
    )
    deadline, num_rows, num_tokens = began + 60.0 * args.minutes, 0, 0
    for start in range(0, len(jobs), args.chunk):
        if time.monotonic() > deadline:
            break
        part = jobs[start : start + args.chunk]
        params = [sampling(args, job.temperature, args.max_tokens) for job in part]
        outputs = generate(llm, [job.prompt_ids for job in part], params)
        for job, output in zip(part, outputs, strict=True):
            ids = [*job.prompt_ids, *output.token_ids]
            if len(output.token_ids) < 3:
                continue
            append_jsonl(
                folder / "rows.jsonl",
                {
                    "id": job.row_id,
                    "category": job.category,
                    "input_ids": ids,
                    "loss_spans": [[len(job.prompt_ids), len(ids)]],
                    "finish_reason": output.finish_reason,
                },
            )
            num_rows, num_tokens = num_rows + 1, num_tokens + len(output.token_ids)
        speed = num_tokens / (time.monotonic() - began)
        print(f"{start + len(part)}/{len(jobs)} answers, {num_tokens:,} tokens, {speed:,.0f}/s")
    facts = args.target
    write_json(
        folder / "data.json",
        {
            "format": "paceline-data/1",
            "complete": True,
            "made_by": "recipes/smollm2-eagle3/train_gpu.py",
            "target": {
                "name": facts.name,
                "tokenizer_sha256": facts.tokenizer_sha256,
                "chat_template_sha256": facts.chat_template_sha256,
                "weights_fingerprint": facts.weights_fingerprint,
            },
            "sampling": {"temperature": [0.0, 0.5, 0.8, 1.0], "sampled_share": args.sampled_share},
            "thinking": "none",
            "prompts": {"name": "train + asked by the target itself", "num_prompts": num_rows},
            "counts": {"rows": num_rows, "answer_tokens": num_tokens},
            "rejected": [],
            "rows_sha256": sha256_file(folder / "rows.jsonl"),
            "provenance": build_provenance(seed=0),
        },
    )
    seconds = round(time.monotonic() - began, 1)
    return {"rows": num_rows, "answer_tokens": num_tokens, "seconds": seconds}


def measure_steps(recipe: Recipe, args: argparse.Namespace) -> int:
    """How many steps fit into the minutes: a short run, its first steps left out."""
    if args.tiny:
        return 3
    trial, clock = args.work / "trial", []
    shutil.rmtree(trial, ignore_errors=True)
    train_draft(
        with_num_steps(recipe, 60),
        target=args.target,
        data_dir=args.work / "data",
        out_dir=trial,
        device=args.device,
        on_progress=lambda p: clock.append(time.monotonic()),
    )
    step_s = (clock[-1] - clock[20]) / (len(clock) - 21)
    print(f"{step_s * 1000:.0f} ms a step")
    return max(100, int(60.0 * args.minutes / step_s))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Stage 2: the draft folder."""
    recipe = read_recipe(args.recipe)
    if args.tiny:
        optim = replace(recipe.optim, tokens_per_batch=1024, warmup_steps=1)
        recipe = replace(recipe, optim=optim)
    out, began = args.work / "draft", time.monotonic()
    steps_path = args.work / "num_steps.json"
    if not args.resume:
        for old in (out, out.with_name("draft.checkpoint")):
            shutil.rmtree(old, ignore_errors=True)
        write_json(steps_path, {"num_steps": args.num_steps or measure_steps(recipe, args)})
    recipe = with_num_steps(recipe, json.loads(steps_path.read_text())["num_steps"])
    history: list[dict[str, Any]] = []

    def show(p: Any) -> None:
        every = max(1, p.num_steps // 60)
        if p.step % every == 0 or p.step == p.num_steps:
            history.append(
                {
                    "step": p.step,
                    "loss": round(p.loss, 4),
                    "position_accuracy": [round(a or 0.0, 4) for a in p.position_accuracy],
                    "tokens_per_s": round(p.tokens_per_s),
                }
            )
            print(json.dumps(history[-1]), flush=True)

    draft = train_draft(
        recipe,
        target=args.target,
        data_dir=args.work / "data",
        out_dir=out,
        device=args.device,
        resume=args.resume,
        on_progress=show,
    )
    shutil.rmtree(args.out / "draft", ignore_errors=True)
    shutil.copytree(out, args.out / "draft")
    texts = json.loads((args.work / "held_out.json").read_text())["texts"]
    walked = simulate_draft(draft, args.target, texts, device=args.device)
    every = [took for steps in walked for took in steps]
    k = draft.num_speculative_tokens
    simulated = build_acceptance(every, [k] * len(every), num_speculative_tokens=k)
    return {
        "simulated_acceptance_length": simulated.acceptance_length,
        "simulated_position_acceptance": simulated.position_acceptance,
        "num_steps": recipe.optim.num_steps,
        "num_parameters": draft.num_parameters,
        "files_bytes": draft.files_bytes,
        "seconds": round(time.monotonic() - began, 1),
        "history": history,
    }


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Stage 3: served acceptance on held-out prompts, greedy, and the replay of the same steps."""
    draft = read_draft(args.work / "draft")
    k = draft.num_speculative_tokens
    llm = build_engine(
        args,
        speculative_config={
            "method": "eagle3",
            "model": str(draft.path),
            "num_speculative_tokens": k,
        },
        per_request_spec_decode_metrics="detailed",
        gpu_memory_utilization=0.5,
        max_num_seqs=min(args.num_seqs, 32),
    )
    tokenizer = open_tokenizer(args.target)
    prompts = read_prompts("held-out").prompts[: args.num_eval]
    asked = [tokenizer.encode_prompt(prompt.messages) for prompt in prompts]
    outputs = generate(llm, asked, sampling(args, 0.0, args.max_tokens))
    texts, categories = [], {}
    for prompt, ids, output in zip(prompts, asked, outputs, strict=True):
        steps = output.spec_decode_metrics
        texts.append((ids, list(output.token_ids), list(steps.per_step_accepted)))
        categories.setdefault(prompt.category, []).append(texts[-1])

    def length(some: list[Any]) -> float:
        accepted = [took for _, _, steps in some for took in steps]
        return 1.0 + sum(accepted) / max(1, len(accepted))

    every = [took for _, _, steps in texts for took in steps]
    served = build_acceptance(every, [k] * len(every), num_speculative_tokens=k)
    delivered = sum(len(out) - 1 for _, out, _ in texts)
    replay = replay_draft(read_draft(draft.path), args.target, texts, device=args.device)
    return {
        "num_prompts": len(texts),
        "num_steps": served.num_steps,
        "acceptance_length": served.acceptance_length,
        "delivered_per_step": delivered / max(1, served.num_steps),
        "position_acceptance": served.position_acceptance,
        "by_category": {name: round(length(some), 3) for name, some in sorted(categories.items())},
        "replay": {
            "num_steps": replay.num_steps,
            "num_agree": replay.num_agree,
            "share": replay.share,
            "position_served": replay.position_served,
            "position_trained": replay.position_trained,
        },
    }


def print_table(log: dict[str, Any]) -> None:
    found = log.get("eval")
    if found is None:
        return
    replay = found["replay"]
    rows = [
        ("acceptance length (bonus included)", f"{found['acceptance_length']:.3f}"),
        ("delivered tokens a step", f"{found['delivered_per_step']:.3f}"),
        ("position acceptance", " ".join(f"{p:.3f}" for p in found["position_acceptance"])),
        ("replay, position acceptance", " ".join(f"{p:.3f}" for p in replay["position_trained"])),
        ("replay, steps that agree", f"{replay['num_agree']} of {replay['num_steps']}"),
        *((f"  {name}", f"{value:.3f}") for name, value in found["by_category"].items()),
    ]
    for label, value in rows:
        print(f"{label:36} {value}")


STAGES = {"answer": answer, "train": train, "eval": evaluate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, type=read_target, help="a target folder")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/smollm2-draft"))
    parser.add_argument("--stage", choices=[*STAGES, "all"], default="all")
    parser.add_argument("--recipe", type=Path, default=HERE / "recipe.toml")
    parser.add_argument("--minutes", type=float, default=5.0, help="of answering, of training")
    parser.add_argument("--num-steps", type=int, help="in place of measuring and --minutes")
    parser.add_argument("--resume", action="store_true", help="train: go on after a kill")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-prompts", type=int, default=16_000)
    parser.add_argument("--num-self", type=int, default=32_000)
    parser.add_argument("--num-eval", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-prompt", type=int, default=256, help="longer prompts are left out")
    parser.add_argument("--sampled-share", type=float, default=0.3)
    parser.add_argument("--num-seqs", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=8192, help="answers between two looks at time")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few prompts and steps on a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.device, args.eager, args.num_seqs, args.chunk = "cpu", True, 16, 16
        args.num_prompts, args.num_self, args.num_eval, args.max_tokens = 12, 8, 4, 32
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    log_path = args.work / "log.json"
    if args.stage == "all":  # one process a stage: a closed engine does not give back all memory
        for stage in STAGES:
            subprocess.run([sys.executable, *sys.argv, "--stage", stage], check=True)
        return
    log = json.loads(log_path.read_text()) if log_path.exists() else {}
    log[args.stage] = STAGES[args.stage](args)
    write_json(log_path, log)
    write_json(args.out / "log.json", log)
    summary = {key: value for key, value in log[args.stage].items() if key != "history"}
    print(f"{args.stage}: {json.dumps(summary)}")
    print_table(log)


if __name__ == "__main__":
    main()
