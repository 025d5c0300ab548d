"""How each number in the report is defined, in one sentence each."""

from __future__ import annotations

__all__ = ["DEFINITIONS"]

DEFINITIONS: tuple[tuple[str, str], ...] = (
    (
        "Score",
        "100 × the weighted sum of the three capped ratios. Each ratio is the candidate's "
        "advantage, so above 1 is better. The baseline against itself is exactly 100. Below the "
        "acceptance gate a run has a score but no rank.",
    ),
    (
        "Acceptance length, scored (tau)",
        "Delivered tokens after the first, divided by the target's decode passes, steps without a "
        "draft included; tokens past a stop do not count. Pooled inside a category, then the plain "
        "mean over categories. It includes the target's own token, so it lies between 1 and K + 1.",
    ),
    (
        "Acceptance length, vLLM's own",
        "1 + accepted tokens / drafting steps, from the engine's counters. Steps without a draft "
        "are absent, tokens past a stop are counted and long answers weigh more, so it usually "
        "reads higher than tau.",
    ),
    (
        "Coverage",
        "Share of the target's decode passes that had a draft to check.",
    ),
    (
        "Acceptance by position",
        "Share of drafting steps whose first i drafted tokens all held. Given earlier: the same "
        "among steps whose earlier tokens held.",
    ),
    (
        "Draft memory",
        "Bytes that the draft adds to the target for one sequence of the stated length: its own "
        "weights and buffers after sharing, its KV cache and its recurrent state.",
    ),
    (
        "Time per token (TPOT)",
        "(Arrival of the last token − arrival of the first) / tokens after the first, one request "
        "at a time. Candidate and baseline are paired by prompt; the rules name the statistic.",
    ),
    ("Time to first token (TTFT)", "From sending the request to the first token of any kind."),
    (
        "Step time",
        "Time between the first and the last token / the target's decode passes in it: what one "
        "draft-and-check step costs.",
    ),
    (
        "Fidelity",
        "Greedy texts with the draft against the target's own. A near tie is a first difference "
        "where the target's two best tokens lie within the tolerance; anything wider is real.",
    ),
    (
        "Trained against served",
        "The served steps walked again through the training code: how many accept the same number "
        "of tokens, and how often the first position holds in both. bfloat16 rounds differently in "
        "the two, so a draft's near ties fall either way; a wide gap is a real difference.",
    ),
    (
        "Interval",
        "From the spread over prompts inside each category and over blocks, candidate and baseline "
        "paired: Student's for time, a studentised bootstrap for acceptance and score, because "
        "plain percentiles hold the truth too rarely for few prompts. Draft memory is counted, not "
        "sampled, so it has none.",
    ),
    (
        "Noise floor",
        "What one draft differs from itself by on this machine, on servers of its own and under "
        "the same protocol. Differences up to it are ties.",
    ),
    (
        "Withheld",
        "An arm whose texts fail the fidelity gate (real forks, loops, text that is less likely, "
        "shorter, longer or less varied than the target's own) has no score, however fast it is: a "
        "corrupted state is easy to draft for.",
    ),
)
