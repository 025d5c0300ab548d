"""A draft folder in, findings out. No torch, transformers or vLLM; never raises on content."""

from paceline.validate.report import Finding, Report
from paceline.validate.rules import RULES, Rule
from paceline.validate.run import validate_draft

__all__ = ["RULES", "Finding", "Report", "Rule", "validate_draft"]
