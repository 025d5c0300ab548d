"""What a contest fixes, as records. The numbers live in the TOML files beside this module."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "TPOT_STATISTICS",
    "Checks",
    "Contest",
    "Engine",
    "Fidelity",
    "Gate",
    "Limits",
    "Prompts",
    "Protocol",
    "Replay",
    "Rules",
    "SamplingRules",
    "Speculation",
    "Statistics",
    "TargetRules",
    "Term",
    "Terms",
]

TPOT_STATISTICS = ("ratio_of_medians", "paired_geomean")


@dataclass(frozen=True, kw_only=True)
class Term:
    """One term of the score. weight: share of 1; cap: largest ratio that counts, None for none."""

    weight: float
    cap: float | None


@dataclass(frozen=True, kw_only=True)
class Terms:
    """tau: tau/tau_B; memory: M_B/M; tpot: TPOT_B/TPOT, by `tpot_statistic` over prompts."""

    tau: Term
    memory: Term
    tpot: Term
    tpot_statistic: str


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Below this share of the baseline's tau a draft is not ranked; the edge itself passes."""

    minimum_tau_ratio: float


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a draft folder may be. max_files_bytes counts every file of the folder.

    forbids_copied_layers: a draft may not hold copies of the target's layers; sharing embeddings
    and output layer, and the target's own MTP head, is not meant by it.
    """

    families: tuple[str, ...]
    max_parameters: int
    max_files_bytes: int
    context_tokens: int
    forbids_copied_layers: bool = False


@dataclass(frozen=True, kw_only=True)
class TargetRules:
    name: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Engine:
    name: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """K of the baseline and of the entries, and how the engine must reject."""

    baseline_family: str
    baseline_num_speculative_tokens: int
    entry_num_speculative_tokens: int
    rejection_sample_method: str


@dataclass(frozen=True, kw_only=True)
class SamplingRules:
    """temperature 0 is greedy; max_tokens is the longest answer."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The test set. length_buckets: upper edges in prompt tokens, ascending, for tau by length."""

    name: str
    num_categories: int
    min_prompts_per_category: int
    length_buckets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a run is made and when it is invalid. Shares are of 1.

    max_other_cpu_share: of the CPU, for other processes during a block; max_clock_difference:
    between the GPU's clocks in the two blocks of a pair. Beyond them a block is void and measured
    again, at most max_block_reruns times. Keys with a value here may be left out of a rules file.
    """

    num_warm_up_requests: int
    min_tokens_for_tpot: int
    max_failure_share: float
    max_prefix_hit_share: float
    max_other_cpu_share: float = 0.1
    max_clock_difference: float = 0.01
    max_block_reruns: int = 2


@dataclass(frozen=True, kw_only=True)
class Statistics:
    confidence: float
    num_resamples: int


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Text with a draft against text without: what an arm may differ by and still be scored.

    A first difference is a near tie when the target gives both tokens a logprob within
    `tolerance_nats` of its best. A text loops when the share of its n-grams (n = loop_ngram) that
    repeat an earlier one exceeds max_repeated_share. The rest are means over texts, the arm less
    the target alone; they count only where chance does not explain them: max_extra_nll_nats a token
    under the target, max_length_change (share of the target's mean length), max_eos_change (share
    of texts that end by themselves), max_distinct_2_drop. Keys with a value here may be left out of
    a rules file: files written before these checks existed are read as ever.
    """

    tolerance_nats: float
    max_real_fork_share: float
    loop_ngram: int
    max_repeated_share: float
    max_extra_looping_share: float
    max_extra_nll_nats: float = 0.1
    max_length_change: float = 0.25
    max_eos_change: float = 0.1
    max_distinct_2_drop: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Trained acceptance against served acceptance: both must hold for `passed`.

    minimum_share: of steps that agree, or differ where the draft's own logits hold the two tokens
    within near_tie_logits of each other, so that rounding decides.
    """

    minimum_share: float
    near_tie_logits: float
    max_position_1_difference: float


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Acceptance length 1.00 over this many steps says that the draft contributes nothing."""

    min_steps_without_acceptance: int


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What entrants must know beside the numbers. dates: "when: what".

    max_order_effect: how far a draft's acceptance may move, of 1, when requests come in another
    order, before that is taken for state that it keeps.
    """

    organiser: str
    dates: tuple[str, ...]
    how_to_submit: tuple[str, ...]
    not_allowed: tuple[str, ...]
    max_entries_per_team: int
    num_final_entries_per_team: int
    max_order_effect: float


@dataclass(frozen=True, kw_only=True)
class Rules:
    """One contest, exactly as in its file.

    contest: None where the rules are of no contest that takes entries.
    provisional: dotted names of values that the organiser has not published.
    text, sha256: the file itself, so that a result can carry its rules.
    """

    name: str
    version: str
    title: str
    baseline_score: float
    terms: Terms
    gate: Gate
    limits: Limits
    target: TargetRules
    engine: Engine
    speculation: Speculation
    sampling: SamplingRules
    prompts: Prompts
    protocol: Protocol
    statistics: Statistics
    fidelity: Fidelity
    replay: Replay
    checks: Checks
    contest: Contest | None
    provisional: tuple[str, ...]
    text: str
    sha256: str

    @property
    def weights(self) -> dict[str, float]:
        """Term name -> weight, in the order tau, memory, tpot."""
        return {name: term.weight for name, term in self._terms.items()}

    @property
    def caps(self) -> dict[str, float | None]:
        """Term name -> cap, None for none."""
        return {name: term.cap for name, term in self._terms.items()}

    @property
    def _terms(self) -> dict[str, Term]:
        return {"tau": self.terms.tau, "memory": self.terms.memory, "tpot": self.terms.tpot}

    @property
    def families(self) -> tuple[str, ...]:
        return self.limits.families

    @property
    def context_tokens(self) -> int:
        return self.limits.context_tokens
