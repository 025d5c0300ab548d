"""Whether a plan can work, found before any process starts. Sources: vLLM 0.31.0's own limits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paceline.draft import (
    SPEC_KEYS,
    Draft,
    build_contract,
    check_tensors,
    default_aux_layer_ids,
    explain_no_cpu_kernel,
    read_aux_layer_ids,
)
from paceline.errors import PlanError
from paceline.methods import MAX_NUM_SPECULATIVE_TOKENS, METHODS
from paceline.problems import without_notes
from paceline.serve.install import require_vllm
from paceline.serve.model_free import check_model_free, is_model_free
from paceline.serve.parallel import check_parallel, is_parallel
from paceline.serve.plan import Plan
from paceline.serve.pool_size import BLOCK_TOKENS, kv_bytes_per_token
from paceline.target import read_weight_headers

__all__ = ["check_plan"]

_DTYPES = ("bfloat16", "float16", "float32")
_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM's CPU attention
_MAX_NUM_SEQS = 4096  # every buffer of the engine grows with it


def check_plan(plan: Plan) -> list[str]:
    """Notes on a plan that will start; raises PlanError, or MissingExtraError, on one that cannot.

    Looks at the settings, the draft against the target, the installed vLLM and the memory asked
    for; opens no weights and starts nothing.
    """
    notes = list(plan.notes)
    _check_method(plan)
    _check_k(plan, notes)
    _check_lengths(plan, notes)
    _check_sizes(plan)
    _check_kernels(plan)
    if is_model_free(plan.method):
        check_model_free(plan)
    elif plan.draft is not None:
        _check_spec_keys(plan.draft)
        if METHODS[plan.method].has_weights:
            _check_draft_fits(plan, plan.draft, notes)
            _check_quantized(plan, plan.draft)
    if plan.target.num_tokenizer_tokens is None:
        notes.append("the target has no tokenizer: prompts must come as token ids")
    require_vllm(plan.device)
    return notes


def _check_method(plan: Plan) -> None:
    method = METHODS[plan.method]
    if not method.serves:
        able = ", ".join(name for name, row in METHODS.items() if row.serves)
        raise PlanError(f"method {plan.method!r} cannot be served yet", expected=f"one of {able}")
    if plan.target.is_hybrid and not method.safe_on_hybrid:
        raise PlanError(
            f"method {plan.method!r} corrupts the answers of a hybrid target: a step without a"
            " draft reads a stale recurrent state (vLLM #39273, unfixed in 0.31.0)",
            where=plan.target.name,
            fix="Use a method that drafts on every step, or serve without a draft.",
        )
    kinds = sorted({kind for kind in plan.target.layer_types if kind})
    if plan.method == "draft_model" and plan.runner == "v1" and len(kinds) > 1:
        raise PlanError(
            f"a draft model beside a target whose layers are of several kinds ({', '.join(kinds)})"
            " overwrites the target's states: vLLM 0.31.0's first model runner, the only one on a"
            " CPU, gives it the block table of the target's first cache group, not of its own",
            where=plan.target.name,
            expected="a target with one kind of layers, or a GPU and the second runner",
            fix="Take another family on this machine: eagle3, mtp or medusa.",
        )
    config = plan.target.config
    if "speculators_config" in config:
        raise PlanError(
            "the target folder is itself a draft in speculators format: vLLM would take method and"
            " target from it",
            where=str(plan.target.path),
            fix="Point --target at the model the draft was built for.",
        )


def _check_k(plan: Plan, notes: list[str]) -> None:
    k = plan.num_speculative_tokens
    if plan.method == "none":
        return
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_NUM_SPECULATIVE_TOKENS:
        raise PlanError(
            f"K = {k} drafted tokens a step is out of range",
            where="num_speculative_tokens",
            expected=f"1 to {MAX_NUM_SPECULATIVE_TOKENS}",
            fix="Leave K out to take the draft's own value.",
        )
    stated = plan.draft.num_speculative_tokens if plan.draft is not None else None
    if plan.method == "medusa" and stated is not None and k > stated:
        raise PlanError(
            f"K = {k}, but the draft has {stated} heads",
            where="num_speculative_tokens",
            expected=f"at most {stated}, one head a drafted token",
            fix="vLLM would look for a head that the folder does not hold, and stop.",
        )
    is_trained_for_k = METHODS[plan.method].has_weights and plan.method != "draft_model"
    if stated is not None and k > stated and is_trained_for_k:
        notes.append(
            f"K = {k}, but the draft states {stated}: later positions run the same layer once more"
            " and were not trained for it"
        )
    if k + 2 > plan.max_model_len:
        raise PlanError(
            f"K = {k} does not fit max_model_len = {plan.max_model_len}",
            where="num_speculative_tokens",
            expected="room for a prompt, K drafted tokens and one more",
        )


def _check_lengths(plan: Plan, notes: list[str]) -> None:
    limit = plan.target.max_position_embeddings
    if not 1 <= plan.max_model_len <= limit:
        raise PlanError(
            f"max_model_len = {plan.max_model_len} is out of range",
            where=plan.target.name,
            expected=f"1 to {limit}, the target's positions",
        )
    if plan.draft is None or not METHODS[plan.method].has_weights:
        return
    positions = plan.draft.config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions >= plan.max_model_len:
        return
    if plan.method == "draft_model":
        what = f"the draft model knows {positions} positions, max_model_len is {plan.max_model_len}"
        if plan.target.is_hybrid:
            raise PlanError(
                f"{what}: vLLM drafts nothing beyond, and a hybrid target's step without a draft"
                " reads a stale recurrent state (vLLM #39273)",
                where=f"{plan.draft.path}/config.json: max_position_embeddings",
                expected=f"at least {plan.max_model_len}",
                fix="Lower max_model_len.",
            )
        notes.append(f"{what}: vLLM drafts nothing beyond")
    else:
        notes.append(
            f"the draft knows {positions} positions, max_model_len is {plan.max_model_len}: vLLM"
            " stretches the draft's rotary table, positions beyond were not trained"
        )


def _check_sizes(plan: Plan) -> None:
    args = plan.engine_args
    if args["dtype"] not in _DTYPES:
        raise PlanError(
            f"dtype {args['dtype']!r} is unknown", where="dtype", expected=f"one of {_DTYPES}"
        )
    for name, low, high in (("max_num_seqs", 1, _MAX_NUM_SEQS), ("seed", 0, 2**32 - 1)):
        if not low <= args[name] <= high:
            raise PlanError(f"{name} = {args[name]}", where=name, expected=f"{low} to {high}")
    if plan.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        if plan.num_threads is None or not 1 <= plan.num_threads <= cores:
            raise PlanError(
                f"num_threads = {plan.num_threads}",
                where="num_threads",
                expected=f"1 to {cores}, the cores this process may use",
            )
    pool = args.get("kv_cache_memory_bytes")
    if pool is not None and plan.device == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if pool > memory:
            raise PlanError(
                f"a KV cache of {pool} bytes is larger than this machine's memory",
                where="kv_cache_bytes",
                expected=f"less than {memory} bytes",
            )
    if pool is not None:
        per_token = kv_bytes_per_token(plan.target, plan.draft)
        blocks = -(-plan.max_model_len // BLOCK_TOKENS)
        one = blocks * BLOCK_TOKENS * per_token
        if pool < one:
            raise PlanError(
                f"a KV cache of {pool} bytes holds {pool // per_token} tokens",
                where="kv_cache_bytes",
                expected=f"{one} bytes, one sequence of max_model_len = {plan.max_model_len}",
                fix="Raise kv_cache_bytes or lower max_model_len.",
            )


def _check_kernels(plan: Plan) -> None:
    """Quantised weights that the CPU build has no kernel for."""
    if plan.device != "cpu":
        return
    found: list[tuple[str, Any, Mapping[str, Any]]] = []
    nested = plan.target.config.get("text_config")
    for level in (plan.target.config, nested if isinstance(nested, Mapping) else {}):
        if isinstance(level.get("quantization_config"), Mapping):
            headers = read_weight_headers(plan.target.path, require_weights=False).values()
            held = {name: info for header in headers for name, info in header.tensors.items()}
            found.append((str(plan.target.path), level["quantization_config"], held))
    if plan.draft is not None and isinstance(plan.draft.config.get("quantization_config"), Mapping):
        settings = plan.draft.config["quantization_config"]
        found.append((str(plan.draft.path), settings, plan.draft.tensors))
    for where, settings, tensors in found:
        packed = {n: info.shape for n, info in tensors.items() if n.endswith(".weight_packed")}
        reason = explain_no_cpu_kernel(settings, packed)
        if reason is not None:
            raise PlanError(
                reason, where=where, fix="Serve it on a GPU, or quantise to w4a16, w8a8 or fp8."
            )


def _check_spec_keys(draft: Draft) -> None:
    known = SPEC_KEYS.get(draft.family, ("family", "num_speculative_tokens"))
    unknown = sorted(set(draft.spec) - set(known))
    if unknown:
        raise PlanError(
            f"key {unknown[0]!r} has no effect for family {draft.family!r}",
            where=f"{draft.path}/spec.json",
            expected=f"only {', '.join(known)}",
            fix="Remove it.",
        )


def _check_quantized(plan: Plan, draft: Draft) -> None:
    """A list of plain layers can go by their numbers, which vLLM counts on from the target's."""
    if draft.config.get("quantization_config") is None:
        return
    contract = build_contract(draft.family, draft.config, plan.target)
    problems = without_notes(check_tensors(contract, {"": dict(draft.tensors)}))
    if problems:
        raise PlanError(
            f"{problems[0].message}: of a target of {plan.target.num_hidden_layers} layers vLLM"
            f" calls the draft's first layer {plan.target.num_hidden_layers}",
            where=str(draft.path),
            expected="a quantization_config that leaves plain what is stored plain",
            fix="Quantise the draft for this target, or name layers by patterns for any number.",
        )


def _check_draft_fits(plan: Plan, draft: Draft, notes: list[str]) -> None:
    target, config = plan.target, draft.config
    where = f"{draft.path}/config.json"
    fix = f"Point --target at the model this draft was built for, or train one for {target.name}."
    expected_hidden = config.get("target_hidden_size", config.get("hidden_size"))
    for key, found, right in (
        ("hidden_size", expected_hidden, target.hidden_size),
        ("vocab_size", config.get("vocab_size"), target.vocab_size),
    ):
        if key == "hidden_size" and draft.family == "draft_model":  # a model of its own
            continue
        if found != right:
            raise PlanError(
                f"the draft is for a target with {key} {found}, {target.name} has {right}",
                where=where,
                fix=fix,
            )
    if draft.family == "eagle3":
        _check_taps(config, target.num_hidden_layers, where, fix)
    if is_parallel(draft):
        check_parallel(plan, draft, notes)
    head_dim = config.get("head_dim")
    if plan.device == "cpu" and isinstance(head_dim, int) and head_dim not in _CPU_HEAD_DIMS:
        raise PlanError(
            f"the draft's heads have {head_dim} dimensions, and vLLM's CPU attention stops at its"
            " first step with them",
            where=f"{where}: head_dim",
            expected=f"one of {', '.join(map(str, _CPU_HEAD_DIMS))}",
            fix="Serve it on a GPU, or train a draft with another head_dim.",
        )
    trained = draft.metadata.get("trained")
    if isinstance(trained, Mapping):
        _compare_training(trained, plan, notes)
    if plan.engine_args["dtype"] == "float16" and any(
        tensor.dtype == "BF16" for tensor in draft.tensors.values()
    ):
        notes.append(
            "a bf16 draft is served in float16: values above 65,504 overflow and acceptance may"
            " fall to nothing (vLLM #55250)"
        )


def _check_taps(config: Mapping[str, Any], num_layers: int, where: str, fix: str) -> None:
    taps = read_aux_layer_ids(config)
    if taps is None:
        default = default_aux_layer_ids(num_layers)
        built = config.get("num_aux_hidden_states") or 3
        if built != len(default) or min(default) < 0:
            raise PlanError(
                f"the draft names no tapped layers: vLLM would tap {list(default)} of {num_layers},"
                f" but build fc for {built}, and stop at its first step",
                where=where,
                fix=fix,
            )
        return
    if not all(
        isinstance(tap, int) and not isinstance(tap, bool) and 0 <= tap <= num_layers
        for tap in taps
    ):
        raise PlanError(
            f"tapped layers {list(taps)}",
            where=where,
            expected=f"layer ids from 0 to {num_layers}, the target's number of layers",
            fix=fix,
        )


def _compare_training(trained: Mapping[str, Any], plan: Plan, notes: list[str]) -> None:
    found: Mapping[str, Any] = trained
    for key in ("target", "target_fingerprints", "fingerprints"):
        nested = trained.get(key)
        if isinstance(nested, Mapping):
            found = nested
    for key, label in (
        ("tokenizer_sha256", "tokenizer"),
        ("chat_template_sha256", "chat template"),
        ("weights_fingerprint", "weights"),
    ):
        ours = getattr(plan.target, key)
        theirs = found.get(key, trained.get(key))
        if theirs is not None and ours is not None and theirs != ours:
            notes.append(
                f"the draft was trained on a target with another {label} ({str(theirs)[:12]}, here"
                f" {ours[:12]}): expect lower acceptance"
            )
