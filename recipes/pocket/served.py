"""What vLLM makes of pocket: plain greedy text, the native MTP head, and transformers beside it."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from paceline.acceptance import build_acceptance
from paceline.data import open_tokenizer, read_prompts
from paceline.records import write_json
from paceline.target import read_target

__all__ = ["evaluate", "plain"]

_TIE_NAT = 0.15  # gap of the two likeliest tokens under which bf16 engines may differ


def build_engine(args: argparse.Namespace, **extra: Any) -> Any:
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": str(args.out / "pocket"),
        "dtype": "bfloat16",
        "load_format": "safetensors",
        "generation_config": "vllm",
        "max_model_len": 2048,
        "max_num_seqs": args.num_seqs,
        "enforce_eager": args.eager,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
        **extra,
    }
    if args.device == "cuda":
        settings["gpu_memory_utilization"] = 0.5
        settings["gdn_prefill_backend"] = "triton"
    else:
        settings["kv_cache_memory_bytes"] = 512 * 2**20
    return LLM(**settings)


def ask(args: argparse.Namespace, llm: Any) -> tuple[list[Any], list[list[int]], list[Any], float]:
    """(prompts, their ids, outputs, seconds one by one of the first eight)."""
    from vllm import SamplingParams

    target = read_target(str(args.out / "pocket"))
    tokenizer = open_tokenizer(target, thinking=args.thinking)
    prompts = list(read_prompts("held-out").prompts[: args.num_eval])
    asked = [list(tokenizer.encode_prompt(prompt.messages)) for prompt in prompts]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=args.eval_tokens,
        stop_token_ids=list(target.eos_token_ids),
        detokenize=False,
    )
    inputs = [{"prompt_token_ids": ids} for ids in asked]
    outputs = [o.outputs[0] for o in llm.generate(inputs, params, use_tqdm=False)]
    began, num = time.monotonic(), 0
    for single in inputs[:8]:
        num += len(llm.generate([single], params, use_tqdm=False)[0].outputs[0].token_ids)
    return prompts, asked, outputs, num / (time.monotonic() - began)


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """Stage 5: without a draft, and transformers' argmax along the same text."""
    llm = build_engine(args)
    prompts, asked, outputs, speed = ask(args, llm)
    texts = [list(output.token_ids) for output in outputs]
    write_json(args.work / "plain.json", {"texts": texts})
    tokenizer = open_tokenizer(read_target(str(args.out / "pocket")), thinking=args.thinking)
    for prompt, ids in list(zip(prompts, texts, strict=True))[:6]:
        print(f"--- {prompt.messages[0]['content'][:120]!r}\n{tokenizer.decode(ids)}")
    fours = [[tuple(ids[i : i + 4]) for i in range(len(ids) - 3)] for ids in texts]
    num_fours = sum(map(len, fours))
    return {
        "tokens_per_s_one_by_one": round(speed, 1),
        "ended_by_itself": sum(output.finish_reason == "stop" for output in outputs),
        "num_texts": len(texts),
        "distinct_texts": len({tuple(ids) for ids in texts}),
        "distinct_four_grams": round(sum(len(set(f)) for f in fours) / max(1, num_fours), 3),
        "transformers": compare(args, asked, texts),
    }


def gaps(args: argparse.Namespace, rows: list[tuple[list[int], list[int]]]) -> list[list[float]]:
    """transformers in float32: by how many nats its likeliest token beats the given one."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(args.out / "pocket"), dtype=torch.float32)
    model = model.to(args.device).eval()
    result = []
    for prompt, ids in rows:
        with torch.no_grad():
            tokens = torch.tensor([prompt + ids], device=args.device)
            logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        result.append((logits.max(-1).values - chosen).tolist())
    return result


def compare(
    args: argparse.Namespace, asked: list[list[int]], texts: list[list[int]]
) -> dict[str, Any]:
    """How far vLLM's greedy text is transformers' greedy text, along vLLM's own text."""
    every = gaps(args, list(zip(asked, texts, strict=True)))
    flat = [gap for row in every for gap in row]
    return {
        "texts_equal": sum(all(gap == 0.0 for gap in row) for row in every),
        "tokens": len(flat),
        "tokens_equal": sum(gap == 0.0 for gap in flat),
        "largest_gap_nat": round(max(flat, default=0.0), 4),
        "texts_within_ties": sum(all(gap <= _TIE_NAT for gap in row) for row in every),
    }


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Stage 6: the native MTP head, K drafted tokens a step; its text beside the plain one."""
    k = args.k
    llm = build_engine(
        args,
        speculative_config={"method": "mtp", "num_speculative_tokens": k},
        per_request_spec_decode_metrics="detailed",
    )
    prompts, asked, outputs, speed = ask(args, llm)
    texts = [list(output.token_ids) for output in outputs]
    steps = [list(output.spec_decode_metrics.per_step_accepted) for output in outputs]
    every = [took for row in steps for took in row]
    served = build_acceptance(every, [k] * len(every), num_speculative_tokens=k)
    by_category: dict[str, list[int]] = {}
    for prompt, row in zip(prompts, steps, strict=True):
        by_category.setdefault(prompt.category, []).extend(row)
    write_json(
        args.out / f"served-k{k}.json",
        {"k": k, "prompts": asked, "texts": texts, "per_step_accepted": steps},
    )
    plain_texts = json.loads((args.work / "plain.json").read_text())["texts"]
    same = sum(a == b for a, b in zip(texts, plain_texts, strict=True))
    return {
        "k": k,
        "num_steps": served.num_steps,
        "acceptance_length": served.acceptance_length,
        "position_acceptance": served.position_acceptance,
        "delivered_per_step": sum(len(ids) - 1 for ids in texts) / max(1, served.num_steps),
        "by_category": {
            name: round(1 + sum(row) / max(1, len(row)), 3)
            for name, row in sorted(by_category.items())
        },
        "tokens_per_s_one_by_one": round(speed, 1),
        "texts_as_without_draft": f"{same} of {len(texts)}",
        "transformers": compare(args, asked, texts),
    }
