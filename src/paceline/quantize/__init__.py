"""A draft or target folder in, a smaller one out, with what it cost."""

from paceline.quantize.calibration import (
    Calibration,
    CalibrationRow,
    Moments,
    check_rows,
    choose_rows,
)
from paceline.quantize.draft import DraftPlan, plan_draft, quantize_draft
from paceline.quantize.schemes import SCHEMES, choose_scheme, describe_scheme

__all__ = [
    "SCHEMES",
    "Calibration",
    "CalibrationRow",
    "DraftPlan",
    "Moments",
    "check_rows",
    "choose_rows",
    "choose_scheme",
    "describe_scheme",
    "plan_draft",
    "quantize_draft",
]
