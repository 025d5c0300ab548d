"""A draft folder in, findings out. No torch, transformers or vLLM; never raises on content."""

from paceline.validate.junit import render_junit
from paceline.validate.report import Finding, Report
from paceline.validate.rules import RULES, Rule, find_rule
from paceline.validate.run import validate_draft

__all__ = ["RULES", "Finding", "Report", "Rule", "find_rule", "render_junit", "validate_draft"]
