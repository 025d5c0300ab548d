"""The table of contracts over one folder of a family without rules of its own."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.draft import (
    build_contract,
    check_tensors,
    drafts_in_parallel,
    read_dflash_layer_ids,
    read_mask_token_id,
)
from paceline.errors import DraftError
from paceline.problems import show_value
from paceline.validate.case import Case
from paceline.validate.config import check_code_keys, check_keys
from paceline.validate.content import check_parameters
from paceline.validate.decoder import check_decoder
from paceline.validate.fit import check_positions
from paceline.validate.report import Finding, finding, from_problem
from paceline.validate.rope import check_rope

__all__ = ["check_contract", "check_mask_token"]

_FILE = "config.json"


def check_contract(case: Case) -> Iterator[Finding]:
    """Config and tensors of a medusa, draft_model or dflash folder, and the fit to the target."""
    assert case.family is not None
    yield from check_code_keys(case)
    yield from check_keys(case, case.family)
    if case.contract is None:
        yield from _tell_sizes(case)
    elif case.scan.tensors_by_file:
        yield from map(from_problem, check_tensors(case.contract, case.scan.tensors_by_file))
    yield from check_parameters(case)
    yield from _check_target(case)
    yield from check_decoder(case)
    if case.head_dim is not None:
        yield from check_rope(case)
        yield from check_positions(case)
    if case.family == "dflash":
        yield from _check_layer_ids(case)
        yield from check_mask_token(case)
        yield from _check_block(case)


def _tell_sizes(case: Case) -> Iterator[Finding]:
    try:
        build_contract(case.family or "", case.config)
    except DraftError as problem:
        yield finding(
            "cfg.missing",
            _FILE,
            problem.what,
            where=problem.where.removeprefix("config.json: "),
            found="nothing, or no size",
            expected=problem.expected,
            fix=problem.fix or "State it as trained.",
        )


def _check_target(case: Case) -> Iterator[Finding]:
    """Width and vocabulary; a whole model has a width of its own."""
    if case.target is None or case.contract is None or case.contract.sizes is None:
        return
    target, numbers = case.target, case.contract.sizes.numbers
    width = numbers.get("target_hidden_size", numbers["hidden_size"])
    if case.family != "draft_model" and width != target.hidden_size:
        yield finding(
            "cfg.hidden",
            _FILE,
            f"the draft reads hidden states {width} wide, target '{target.name}' makes them"
            f" {target.hidden_size} wide",
            where="hidden_size",
            found=width,
            expected=str(target.hidden_size),
            fix="Point --target at the model the draft was trained for, or train for this one.",
        )
    if numbers["vocab_size"] != target.vocab_size:
        padding = _tell_padding(case, numbers["vocab_size"])
        advice = {
            "draft_model": "Pad or cut the draft's embeddings and head to the target's rows, or"
            " serve with use_heterogeneous_vocab.",
        }
        yield finding(
            "cfg.vocab",
            _FILE,
            f"vocab_size is {numbers['vocab_size']}, target '{target.name}' has"
            f" {target.vocab_size} embedding rows{padding}"
            + ("; vLLM replaces it and keeps no token map" if case.family == "medusa" else ""),
            where="vocab_size",
            found=numbers["vocab_size"],
            expected=str(target.vocab_size),
            fix=advice.get(case.family or "", "Train the draft for this target.")
            + " Editing the number alone breaks the weights.",
        )


def _tell_padding(case: Case, vocab_size: int) -> str:
    """Whether the tokenizers are one, as far as the training record says it."""
    assert case.target is not None
    tokens = case.target.num_tokenizer_tokens
    trained = (case.scan.metadata or {}).get("trained")
    record = trained.get("target") if isinstance(trained, dict) else None
    same = record.get("tokenizer_sha256") if isinstance(record, dict) else None
    if same is not None and same == case.target.tokenizer_sha256:
        number = f" ({tokens} tokens)" if tokens else ""
        return f": tokenizers identical{number}, padded sizes differ {vocab_size} vs" + (
            f" {case.target.vocab_size}"
        )
    return f" (its tokenizer has {tokens} tokens, the rest is padding)" if tokens else ""


def _check_layer_ids(case: Case) -> Iterator[Finding]:
    ids = read_dflash_layer_ids(case.config)
    where = "dflash_config.target_layer_ids"
    if ids is None:
        yield finding(
            "cfg.aux",
            _FILE,
            "the config does not say which target layers are tapped; vLLM would take its default"
            " layers and size fc by the number of draft layers",
            where=where,
            found="nothing",
            expected="the layers of training, counted from 0",
            fix="State them.",
        )
        return
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        return  # reported as json.type
    top = case.target.num_hidden_layers if case.target else None
    if list(ids) != sorted(set(ids)):
        yield finding(
            "cfg.aux",
            _FILE,
            "tapped layers are not ascending and unique; vLLM sorts them and drops repeats, so fc"
            " would read other layers than in training",
            where=where,
            found=list(ids),
            expected=show_value(sorted(set(ids))),
            fix="Train with ascending ids and state them so.",
        )
    outside = [layer for layer in ids if layer < 0 or (top is not None and layer > top)]
    if outside:
        yield finding(
            "cfg.aux",
            _FILE,
            f"the draft taps the output of layer {outside[0] - 1}"
            + (f", but the target has {top} layers" if top is not None else ""),
            where=where,
            found=outside[0] - 1,
            expected=f"0 to {top - 1}" if top is not None else "0 or more",
            fix="DFlash counts layers from 0: the last of n layers is n - 1.",
        )


def check_mask_token(case: Case) -> Iterator[Finding]:
    """`cfg.mask`: the id that fills the slots of a draft that drafts in parallel."""
    if case.family in (None, "eagle3") and not drafts_in_parallel(case.config):
        return
    token = read_mask_token_id(case.config)
    where = "dflash_config.mask_token_id" if case.family == "dflash" else "mask_token_id"
    vocab = case.config.get("vocab_size")
    if token is None:
        yield finding(
            "cfg.mask",
            _FILE,
            "the config names no mask token, and vLLM stops without one",
            where=where,
            found="nothing",
            expected="the id of training",
            fix="State the id that stood in the masked slots.",
        )
    elif isinstance(token, int) and isinstance(vocab, int) and not 0 <= token < vocab:
        yield finding(
            "cfg.mask",
            _FILE,
            f"the mask token {token} has no row in an embedding of {vocab}",
            where=where,
            found=token,
            expected=f"0 to {vocab - 1}",
            fix="Train with an id that the target's embedding has and its text never uses.",
        )
    elif case.target is not None and token in (
        *case.target.eos_token_ids,
        case.target.pad_token_id,
    ):
        yield finding(
            "cfg.mask",
            _FILE,
            f"the mask token {token} is the target's end or padding token, which its text holds",
            where=where,
            found=token,
            expected="a reserved id that no text uses",
            fix="Right only if training used this id in the masked slots.",
            severity="warning",
        )


def _check_block(case: Case) -> Iterator[Finding]:
    """K beyond the block of training: vLLM 0.31.0 does not read block_size."""
    block, k = case.config.get("block_size"), case.num_speculative_tokens
    if isinstance(block, int) and k is not None and k > block - 1:
        yield finding(
            "k.range",
            "spec.json",
            f"K = {k} asks for more tokens than the block of {block} that was trained (one of them"
            " is the token already known); vLLM 0.31.0 does not read block_size",
            where="num_speculative_tokens",
            found=k,
            expected=f"1 to {block - 1}",
            fix=f"Set num_speculative_tokens to {block - 1} or less.",
            severity="warning",
        )
