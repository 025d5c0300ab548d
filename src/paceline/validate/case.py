"""What the rules of one run look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.draft import Contract, Eagle3Sizes, FolderScan
from paceline.rules import Limits, Rules
from paceline.target import TargetFacts

__all__ = ["Case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One folder, and what it is checked against.

    sizes, contract: None when the config states too little to know them.
    limits: of the contest named by the user, or of emc2-2027; is_contest tells which.
    rules: the whole contest, where the user named one.
    """

    scan: FolderScan
    family: str | None
    config: dict[str, Any]
    sizes: Eagle3Sizes | None
    contract: Contract | None
    target: TargetFacts | None
    limits: Limits
    is_contest: bool
    rules: Rules | None = None

    @property
    def num_speculative_tokens(self) -> int | None:
        """K, when spec.json states a sensible one."""
        value = (self.scan.spec or {}).get("num_speculative_tokens")
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return value if is_count else None

    @property
    def head_dim(self) -> int | None:
        """Of the draft's attention; None when the config does not tell, or has no attention."""
        sizes = self.contract.sizes if self.contract is not None else None
        return sizes.numbers.get("head_dim") if sizes is not None else None

    @property
    def baseline_family(self) -> str | None:
        """The family that scores 100 in the contest, where the user named one."""
        return self.rules.speculation.baseline_family if self.rules is not None else None
