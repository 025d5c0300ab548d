"""What a target is: where it comes from and the facts a draft must match."""

from paceline.target.describe import describe_target
from paceline.target.facts import TargetFacts, read_target
from paceline.target.resolve import cache_folder, resolve_target, verify_target
from paceline.target.weights import read_weight_headers

__all__ = [
    "TargetFacts",
    "cache_folder",
    "describe_target",
    "read_target",
    "read_weight_headers",
    "resolve_target",
    "verify_target",
]
