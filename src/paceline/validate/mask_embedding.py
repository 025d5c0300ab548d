"""`mask_embedding.pt`: the pickle that vLLM 0.31.0 reads beside a DFlash draft, told from others.

It is read here without unpickling (draft/mask_embedding.py). What torch.save writes for one tensor
is a warning outside a contest; a contest takes no pickle, and anything else in one is an error.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.draft import (
    MASK_EMBEDDING,
    MAX_MASK_BYTES,
    MaskEmbedding,
    parse_mask_embedding,
    read_bytes,
    read_mask_token_id,
)
from paceline.errors import DraftError
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding, from_problem
from paceline.validate.scan import decode

__all__ = ["check_mask_embedding"]

_INTO_ROW = (
    "put it into the row of the mask token in an embed_tokens.weight of the draft's own: vLLM"
    " 0.31.0 reads it there without unpickling anything."
)


def check_mask_embedding(case: Case, *, deep: bool) -> Iterator[Finding]:
    """`fs.pickle` of this file, and whether vLLM can take the row. deep: its values too."""
    if MASK_EMBEDDING not in case.scan.names:
        return
    if case.family != "dflash":
        yield _refuse("vLLM 0.31.0 reads such a pickle for DFlash alone", "Remove it.")
        return
    if case.is_contest:
        yield _refuse("pickles are not accepted", f"Remove it, and {_INTO_ROW}")
        return
    data, problems = read_bytes(case.scan.path / MASK_EMBEDDING, max_bytes=MAX_MASK_BYTES)
    # a link, or what is no file, is told with the other files
    yield from (from_problem(item) for item in problems if item.rule != "fs.type")
    if data is None:
        return
    try:
        saved = parse_mask_embedding(data)
    except DraftError as problem:
        yield _refuse(
            f"is not what torch.save writes for one tensor, so it is not trusted: {problem.what}",
            f"Save the tensor alone, as floats; or {_INTO_ROW}",
        )
        return
    yield finding(
        "fs.pickle",
        MASK_EMBEDDING,
        "is a pickle of one tensor and nothing else, read here without unpickling it; vLLM 0.31.0"
        " unpickles it and takes it for the mask token's row"
        + ("" if saved.place == "cpu" else f", on '{saved.place}' alone, where it was saved"),
        found="a pickle of one tensor",
        expected="safetensors",
        fix=f"Paceline serves no pickle and a contest takes none. Instead, {_INTO_ROW}",
        severity="warning",
    )
    yield from _check_fit(case, saved)
    if deep:
        yield from _check_values(data, saved)


def _refuse(message: str, fix: str) -> Finding:
    return finding(
        "fs.pickle",
        MASK_EMBEDDING,
        message,
        found=MASK_EMBEDDING,
        expected="model files only",
        fix=fix,
    )


def _check_fit(case: Case, saved: MaskEmbedding) -> Iterator[Finding]:
    """As many numbers as the draft is wide, for the mask token that the config names."""
    width, numbers = case.config.get("hidden_size"), saved.tensor.num_elements
    if isinstance(width, int) and numbers != width:
        yield finding(
            "ten.shape",
            MASK_EMBEDDING,
            f"holds {numbers:,} numbers, the draft is {width:,} wide",
            where=saved.tensor.name,
            found=list(saved.tensor.shape),
            expected=f"{width} numbers",
            fix="Save the mask token's row alone.",
        )
    token, named = read_mask_token_id(case.config), saved.mask_token_id
    if named is not None and named != token:
        yield finding(
            "cfg.mask",
            MASK_EMBEDDING,
            "names another mask token than config.json, and vLLM stops",
            where="mask_token_id",
            found=named,
            expected="nothing" if token is None else str(token),
            fix="Name the token of training in both.",
        )


def _check_values(data: bytes, saved: MaskEmbedding) -> Iterator[Finding]:
    raw = data[saved.tensor.start : saved.tensor.end]
    values = (
        np.frombuffer(raw, dtype="<f8")
        if saved.tensor.dtype == "F64"
        else decode(raw, saved.tensor.dtype)
    )
    num_bad = int(np.count_nonzero(~np.isfinite(values)))
    if num_bad:
        yield finding(
            "ten.finite",
            MASK_EMBEDDING,
            f"{num_bad:,} values of the mask token's row are not finite",
            where=saved.tensor.name,
            found=f"{num_bad:,} values",
            expected="finite values",
            fix="Train it again; this row makes every masked slot's state NaN.",
        )
