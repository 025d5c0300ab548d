"""Tensor headers against their contract: the only check there is.

vLLM 0.31.0 loads an eagle3 draft without its fc or down_proj silently, and skips every name that
it does not know in a medusa or mtp folder; `docs/results/contracts.md` counts such cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.draft.contracts import Contract
from paceline.draft.rows import TensorRule
from paceline.errors import DraftError
from paceline.problems import Problem, keep_worst
from paceline.safetensors_header import TensorInfo

__all__ = ["check_tensors", "explain_shape"]

_MAX_PROBLEMS = 60
_CONFIG = "config.json"


def check_tensors(
    contract: Contract, files: Mapping[str, Mapping[str, TensorInfo]]
) -> list[Problem]:
    """Names, shapes and dtypes of all tensors against the contract. `files`: file -> its tensors.

    A problem of rule `ten.unread` only tells; every other one refuses the folder.
    """
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    present = {contract.canonical(name) for tensors in files.values() for name in tensors}
    try:
        rules = contract.rules_for(present)
    except DraftError as problem:
        return [_unknown_scheme(problem)]
    main_file = min(files, default="model.safetensors")
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            canonical = contract.canonical(name)
            if canonical in seen:
                problems.append(_twice(file, name, seen[canonical]))
                continue
            seen[canonical] = f"{file}: {name}"
            rule = rules.get(canonical)
            if rule is None:
                problems.append(_extra(file, name, contract))
            else:
                problems.extend(_check_one(file, tensor, canonical, rule))
    for name, rule in rules.items():
        if rule.required and name not in seen:
            problems.append(_missing(main_file, name, rule))
    return keep_worst(problems, _MAX_PROBLEMS)


def _unknown_scheme(problem: DraftError) -> Problem:
    where = problem.where.removeprefix(f"{_CONFIG}: ")
    return Problem(
        rule="q.group" if where.endswith("group_size") else "q.method",
        file=_CONFIG,
        where=where,
        found=problem.what,
        expected=problem.expected,
        message=problem.what,
        fix=problem.fix or "Choose a group size that divides the width.",
    )


def _check_one(
    file: str, tensor: TensorInfo, canonical: str, rule: TensorRule
) -> Iterator[Problem]:
    yield from _check_unread(file, tensor, rule)
    if not rule.is_skipped:
        yield from _check_shape(file, tensor, canonical, rule)
        yield from _check_dtype(file, tensor, rule)


def _check_unread(file: str, tensor: TensorInfo, rule: TensorRule) -> Iterator[Problem]:
    """`ten.unread`."""
    if rule.unread:
        yield Problem(
            rule="ten.unread",
            file=file,
            where=tensor.name,
            found=f"{tensor.num_bytes:,} bytes",
            expected="no such tensor",
            message=f"tensor '{tensor.name}' has no effect: {rule.unread}",
            fix="Leave it out.",
        )
    is_right = tensor.shape == rule.shape and tensor.dtype in rule.dtypes
    if rule.is_skipped and not is_right:
        yield Problem(
            rule="ten.unread",
            file=file,
            where=tensor.name,
            found=f"{tensor.dtype} {list(tensor.shape)}",
            expected=f"{rule.dtypes[0]} {list(rule.shape)}, or no such tensor",
            message=f"tensor '{tensor.name}' is not the mask that its name says; vLLM skips it,"
            " and nothing can be held against it here",
            fix="Leave it out, or save it as a bool for each token of the target.",
        )


def _check_shape(
    file: str, tensor: TensorInfo, canonical: str, rule: TensorRule
) -> Iterator[Problem]:
    """`ten.shape`."""
    if tensor.shape != rule.shape and tensor.shape not in rule.also:
        yield Problem(
            rule="ten.shape",
            file=file,
            where=tensor.name,
            found=str(list(tensor.shape)),
            expected=str(list(rule.shape)),
            message=explain_shape(canonical, tensor.shape, rule),
            fix="Make config.json state the sizes that the weights were trained with.",
        )


def _check_dtype(file: str, tensor: TensorInfo, rule: TensorRule) -> Iterator[Problem]:
    """`ten.dtype`."""
    if tensor.dtype not in rule.dtypes:
        yield Problem(
            rule="ten.dtype",
            file=file,
            where=tensor.name,
            found=tensor.dtype,
            expected=" or ".join(rule.dtypes),
            message=f"tensor '{tensor.name}' has dtype {tensor.dtype}",
            fix=f"Save it as {rule.dtypes[0]}.",
        )


def explain_shape(name: str, shape: tuple[int, ...], rule: TensorRule) -> str:
    """One clause that says which size disagrees with which config key."""
    if len(shape) != len(rule.shape):
        return f"tensor '{name}' has {len(shape)} dimensions, the config implies {len(rule.shape)}"
    clauses = []
    for part, found, wanted, why in zip(
        ("rows", "columns"), shape, rule.shape, (rule.rows, rule.columns), strict=False
    ):
        if found != wanted:
            clauses.append(
                f"{part} {found}, config implies {wanted}" + (f" ({why})" if why else "")
            )
    if name == "fc.weight" and shape[1] != rule.shape[1] and " tapped layers x " in rule.columns:
        num_ids, width = rule.columns.split(" tapped layers x ")
        if shape[1] % int(width) == 0:
            return (
                f"fc expects {shape[1] // int(width)} x {width} inputs, got {num_ids} ids"
                " of tapped target layers"
            )
    return f"tensor '{name}' has {'; '.join(clauses)}"


def _twice(file: str, name: str, earlier: str) -> Problem:
    return Problem(
        rule="idx.complete",
        file=file,
        where=name,
        found=f"also in {earlier}",
        expected="each tensor once",
        message=f"tensor '{name}' is there twice",
        fix="Keep one copy; 'layers.0.' and 'midlayer.' are the same layer.",
    )


def _extra(file: str, name: str, contract: Contract) -> Problem:
    bare = contract.canonical(name.removeprefix("model."))
    if bare != name and bare in contract.tensors:
        fix = f"Name it '{bare}': vLLM adds 'model.' itself."
    elif contract.family == "mtp" and name.endswith(
        ("embed_tokens.weight", "lm_head.weight", "d2t")
    ):
        fix = "Remove it: vLLM gives an MTP head the target's embeddings, output and vocabulary."
    elif name == "d2t":
        fix = "Remove it: with the full vocabulary vLLM has no place for it and refuses the file."
    elif name == "mask_hidden":
        fix = "Remove it, or state mask_token_id: without one vLLM skips it and drafts in sequence."
    else:
        fix = "Remove it, or set the config key that makes vLLM use it."
    return Problem(
        rule="ten.extra",
        file=file,
        where=name,
        found=name,
        expected="only tensors that vLLM uses for this config",
        message=f"tensor '{name}' has no place in this {contract.family} draft",
        fix=fix,
    )


def _missing(file: str, name: str, rule: TensorRule) -> Problem:
    return Problem(
        rule="ten.missing",
        file=file,
        where=name,
        found="nothing",
        expected=f"{rule.dtypes[0]} {list(rule.shape)}",
        message=rule.if_missing or f"tensor '{name}' is missing; vLLM would serve random numbers",
        fix=rule.fix_missing or "Export the draft again with all of its tensors.",
    )
