"""Finished conversations -> rows, supervised on the assistant's turns only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.data.prompt import Prompt
from paceline.data.prompt_set import PromptSet, require_few_rejected
from paceline.data.rows import (
    ROWS_NAME,
    Row,
    append_row,
    build_settings,
    finish_record,
    opened_folder,
    read_data_record,
    read_rows,
)
from paceline.data.tokens import ChatTokenizer, Thinking, open_tokenizer
from paceline.errors import DataError
from paceline.target import TargetFacts

__all__ = ["rows_from_conversations"]


def rows_from_conversations(
    prompt_set: PromptSet,
    target: TargetFacts,
    out_dir: str | Path,
    *,
    thinking: Thinking = "none",
) -> dict[str, Any]:
    """Writes one row a conversation with an assistant turn; returns the finished record.

    A span runs from the first token of the assistant's words to the end token, both included; what
    the template writes around a turn is not supervised. Each turn is tokenized by itself, as the
    engine does: the prompt first, then the answer. Conversations without an assistant turn, longer
    than the target's positions, or changed by the template are rejected with line and reason.
    """
    out_dir = Path(out_dir)
    tokenizer = open_tokenizer(target, thinking=thinking)
    settings = build_settings(
        prompt_set, target, made_by="conversations", sampling=None, thinking=thinking
    )
    with opened_folder(out_dir, settings) as is_finished:
        if is_finished:
            return read_data_record(out_dir)
        done = (
            {row.row_id for row in read_rows(out_dir)} if (out_dir / ROWS_NAME).exists() else set()
        )
        rejected: list[dict[str, Any]] = [
            {"line": line, "id": None, "reason": reason} for line, reason in prompt_set.rejected
        ]
        num_before = len(rejected)
        for prompt in prompt_set.prompts:
            if prompt.prompt_id in done:
                continue
            try:
                append_row(out_dir, _build_row(prompt, tokenizer))
            except DataError as problem:
                rejected.append(
                    {"line": prompt.line, "id": prompt.prompt_id, "reason": problem.what}
                )
        require_few_rejected(prompt_set, num_more=len(rejected) - num_before)
        if len(rejected) - num_before == len(prompt_set.prompts):
            raise DataError(
                f"no conversation could be used (first: {rejected[-1]['reason']})",
                where=prompt_set.name,
            )
        rejected.sort(key=lambda item: item["line"])
        return finish_record(out_dir, settings, rejected=rejected, seed=None)


def _build_row(prompt: Prompt, tokenizer: ChatTokenizer) -> Row:
    messages = list(prompt.messages)
    tokenizer.require_plain(messages)
    whole = tokenizer.render(messages, ask=False)
    ids: tuple[int, ...] = ()
    spans: list[tuple[int, int]] = []
    written = 0  # characters of `whole` already turned into ids
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.render(messages[:place], ask=True)
        if not whole.startswith(before) or len(before) < written:
            raise DataError(f"turn {place + 1}: the chat template rewrites earlier turns")
        end = _find_end(whole, len(before), message["content"], tokenizer, place)
        reason = tokenizer.thinking_problem(
            whole[len(tokenizer.render(messages[:place], ask=False)) : end]
        )
        if reason is not None:
            raise DataError(f"turn {place + 1}: {reason}")
        ids += tokenizer.encode(whole[written : len(before)])
        start = len(ids)
        ids += tokenizer.encode(whole[len(before) : end])
        spans.append((start, len(ids)))
        written = end
    if not spans:
        raise DataError("no assistant turn")
    limit = tokenizer.target.max_position_embeddings
    if len(ids) > limit:
        raise DataError(f"{len(ids)} tokens; the target has {limit} positions")
    return Row(
        row_id=prompt.prompt_id,
        category=prompt.category,
        input_ids=ids,  # what follows the last end token teaches nothing and is left out
        loss_spans=tuple(spans),
        finish_reason="given",
    )


def _find_end(whole: str, start: int, content: str, tokenizer: ChatTokenizer, place: int) -> int:
    """Where the assistant's turn ends in `whole`: just after its end token."""
    ends = [
        (found, len(text))
        for text in tokenizer.end_texts
        if (found := whole.find(text, start)) >= 0
    ]
    if not ends:
        raise DataError(f"turn {place + 1}: the chat template writes no end token after it")
    found, length = min(ends)
    if content.strip() not in whole[start:found]:
        raise DataError(f"turn {place + 1}: the chat template changes the assistant's words")
    return found + length
