"""Drafts for pocket on one GPU: own answers, a tuned MTP head, an EAGLE-3 draft; served figures.

    python recipes/pocket/tune.py --target POCKET --out OUT --stage own --part 0/2 --minutes 3 &
    python recipes/pocket/tune.py --target POCKET --out OUT --stage own --part 1/2 --minutes 3
    python recipes/pocket/tune.py --target POCKET --out OUT --stage merge
    python recipes/pocket/tune.py --target POCKET --out OUT --stage train --family mtp --minutes 3
    python recipes/pocket/tune.py --target POCKET --out OUT --stage train --family eagle3
    python recipes/pocket/tune.py --target POCKET --out OUT --stage serve --family mtp --k 3

POCKET is the folder that train_pocket.py exported. `--family native` serves its own head. --work
holds `data/` (a data folder); OUT gets `mtp/`, `eagle3/`, served-FAMILY-kK.json and a
log-STAGE-….json each. One process a stage; stages that do not wait for each other run side by side
on one GPU, since none of so small a model fills it. No network.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

from paceline.acceptance import build_acceptance
from paceline.data import contamination, open_tokenizer, read_prompts
from paceline.draft import read_draft
from paceline.records import append_jsonl, build_provenance, sha256_file, write_json
from paceline.target import read_target
from paceline.train import read_recipe, replay_draft, train_draft
from paceline.train.setup import with_num_steps

HERE = Path(__file__).resolve().parent


def build_engine(args: argparse.Namespace, **extra: Any) -> Any:
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
    settings["kv_cache_memory_bytes"] = (8 * 2**30) if args.device == "cuda" else 512 * 2**20
    if args.device == "cuda":  # several engines share the GPU: the pool is stated, not profiled
        settings.update(gpu_memory_utilization=0.02, gdn_prefill_backend="triton")
    return LLM(**settings)


def sampling(args: argparse.Namespace, temperature: float) -> Any:
    """No seed a request: vLLM then draws row by row, many times slower."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=temperature,
        max_tokens=args.max_tokens,
        stop_token_ids=list(args.target.eos_token_ids),
        detokenize=False,
    )


def own(args: argparse.Namespace) -> dict[str, Any]:
    """Pocket's own answers to its share of the training prompts, most of them greedy."""
    folder = args.work / f"data-{args.part[0]}"
    shutil.rmtree(folder, ignore_errors=True)
    llm = build_engine(args)
    began = time.monotonic()  # the minutes are of answering
    tokenizer = open_tokenizer(args.target, thinking=args.thinking)
    prompts = read_prompts(f"train:{args.num_prompts}").prompts
    leaked = {o.training_id for o in contamination(list(prompts), read_prompts("held-out").prompts)}
    kept = [prompt for prompt in prompts if prompt.prompt_id not in leaked]
    random.Random("own").shuffle(kept)
    draw = random.Random(f"own {args.part[0]}")
    kept = kept[args.part[0] :: args.part[1]]
    num_rows = num_tokens = 0
    for at in range(0, len(kept), args.chunk):
        if time.monotonic() - began > 60.0 * args.minutes:
            break
        part = kept[at : at + args.chunk]
        asked = [list(tokenizer.encode_prompt(prompt.messages)) for prompt in part]
        warm = [0.7 if draw.random() < args.sampled_share else 0.0 for _ in part]
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in asked],
            [sampling(args, temperature) for temperature in warm],
            use_tqdm=False,
        )
        for prompt, ids, output in zip(part, asked, outputs, strict=True):
            answer = output.outputs[0]
            if len(answer.token_ids) < 3:
                continue
            row = {
                "id": prompt.prompt_id,
                "category": prompt.category,
                "input_ids": [*ids, *answer.token_ids],
                "loss_spans": [[len(ids), len(ids) + len(answer.token_ids)]],
                "finish_reason": answer.finish_reason,
            }
            append_jsonl(folder / "rows.jsonl", row)
            num_rows, num_tokens = num_rows + 1, num_tokens + len(answer.token_ids)
        print(f"{num_rows} answers, {num_tokens:,} tokens", flush=True)
    return {"rows": num_rows, "answer_tokens": num_tokens}


def merge(args: argparse.Namespace) -> dict[str, Any]:
    """The parts' answers as one data folder."""
    folder = args.work / "data"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    num_rows = num_tokens = 0
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as out:
        for path in sorted(args.work.glob("data-*/rows.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                begin, end = json.loads(line)["loss_spans"][0]
                num_rows, num_tokens = num_rows + 1, num_tokens + end - begin
                out.write(line + "\n")
    facts = args.target
    write_json(
        folder / "data.json",
        {
            "format": "paceline-data/1",
            "complete": True,
            "target": {
                "name": facts.name,
                "tokenizer_sha256": facts.tokenizer_sha256,
                "chat_template_sha256": facts.chat_template_sha256,
                "weights_fingerprint": facts.weights_fingerprint,
            },
            "sampling": {"temperature": [0.0, 0.7], "sampled_share": args.sampled_share},
            "thinking": args.thinking,
            "prompts": {"name": f"train:{args.num_prompts}", "num_prompts": num_rows},
            "counts": {"rows": num_rows, "answer_tokens": num_tokens},
            "rejected": [],
            "rows_sha256": sha256_file(folder / "rows.jsonl"),
            "provenance": build_provenance(seed=0),
        },
    )
    return {"rows": num_rows, "answer_tokens": num_tokens}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """One draft by recipes/pocket/FAMILY.toml, its steps measured to fill the minutes."""
    recipe = read_recipe(HERE / f"{args.family}.toml")
    history: list[dict[str, Any]] = []

    def run(num_steps: int, out: Path, clock: list[float]) -> Any:
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(out.with_name(out.name + ".checkpoint"), ignore_errors=True)

        def show(p: Any) -> None:
            clock.append(time.monotonic())
            if p.step % max(1, p.num_steps // 40) == 0 or p.step == p.num_steps:
                shown = [round(a or 0.0, 4) for a in p.position_accuracy]
                history.append({"step": p.step, "loss": round(p.loss, 4), "accuracy": shown})
                print(json.dumps(history[-1]), flush=True)

        return train_draft(
            with_num_steps(recipe, num_steps),
            target=args.target,
            data_dir=args.work / "data",
            out_dir=out,
            device=args.device,
            on_progress=show,
        )

    num_steps = args.num_steps
    if num_steps is None:
        clock: list[float] = []
        run(60, args.work / f"trial-{args.family}", clock)
        step_s = (clock[-1] - clock[20]) / (len(clock) - 21)
        num_steps = max(100, int(60.0 * args.minutes / step_s))
        history.clear()
    draft = run(num_steps, args.work / args.family, [])
    shutil.rmtree(args.out / args.family, ignore_errors=True)
    shutil.copytree(args.work / args.family, args.out / args.family)
    return {"num_steps": num_steps, "num_parameters": draft.num_parameters, "history": history}


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """Acceptance on held-out prompts, greedy, and the replay of the very steps."""
    k, config = args.k, {"method": "mtp", "num_speculative_tokens": args.k}
    if args.family != "native":
        config["method"] = read_draft(args.out / args.family).family
        config["model"] = str((args.out / args.family).resolve())
    llm = build_engine(args, speculative_config=config, per_request_spec_decode_metrics="detailed")
    tokenizer = open_tokenizer(args.target, thinking=args.thinking)
    prompts = read_prompts("held-out").prompts[: args.num_eval]
    asked = [list(tokenizer.encode_prompt(prompt.messages)) for prompt in prompts]
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in asked], sampling(args, 0.0), use_tqdm=False
    )
    texts = [
        (
            ids,
            list(o.outputs[0].token_ids),
            list(o.outputs[0].spec_decode_metrics.per_step_accepted),
        )
        for ids, o in zip(asked, outputs, strict=True)
    ]
    every = [took for _, _, steps in texts for took in steps]
    served = build_acceptance(every, [k] * len(every), num_speculative_tokens=k)
    write_json(args.out / f"served-{args.family}-k{k}.json", {"k": k, "texts": texts})
    result: dict[str, Any] = {
        "num_steps": served.num_steps,
        "acceptance_length": served.acceptance_length,
        "position_acceptance": served.position_acceptance,
        "delivered_per_step": sum(len(out) - 1 for _, out, _ in texts) / max(1, served.num_steps),
    }
    if args.family != "native" and k == read_draft(args.out / args.family).num_speculative_tokens:
        draft = read_draft(args.out / args.family)
        for dtype in ("bfloat16", "float32"):
            replay = replay_draft(draft, args.target, texts, device=args.device, dtype=dtype)
            result[f"replay_{dtype}"] = {
                "agree": f"{replay.num_agree} of {replay.num_steps}",
                "position_trained": replay.position_trained,
                "largest_gap": max(replay.gaps, default=0.0),
            }
    return result


STAGES = {"own": own, "merge": merge, "train": train, "serve": serve}


def read_part(words: str) -> tuple[int, int]:
    """ "I/N" as (I, N)."""
    number, _, count = words.partition("/")
    return int(number), int(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, type=read_target)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/pocket-drafts"))
    parser.add_argument("--stage", choices=list(STAGES), required=True)
    families = sorted(path.stem for path in HERE.glob("*.toml"))
    parser.add_argument("--family", choices=("native", *families), default="mtp")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--num-steps", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--thinking", choices=("on", "off"), default="off")
    parser.add_argument("--num-prompts", type=int, default=40_000)
    parser.add_argument("--part", type=read_part, default=(0, 1), help="of the prompts, as I/N")
    parser.add_argument("--sampled-share", type=float, default=0.3)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--num-eval", type=int, default=96)
    parser.add_argument("--num-seqs", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    about = {"own": str(args.part[0]), "merge": "data"}.get(args.stage, f"{args.family}-k{args.k}")
    found = STAGES[args.stage](args)
    write_json(args.out / f"log-{args.stage}-{about}.json", found)
    shown = {key: value for key, value in found.items() if key != "history"}
    print(f"{args.stage} {about}: {json.dumps(shown)}")


if __name__ == "__main__":
    main()
