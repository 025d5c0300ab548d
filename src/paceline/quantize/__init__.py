"""A draft or target folder in, a smaller one out, with what it cost."""

from paceline.quantize.calibration import (
    Calibration,
    CalibrationRow,
    Moments,
    check_rows,
    choose_rows,
    hold_out_rows,
)
from paceline.quantize.distill import Distillation, distill_target, require_distillable
from paceline.quantize.draft import DraftPlan, plan_draft, quantize_draft
from paceline.quantize.price import Price, build_price, parse_share
from paceline.quantize.reshape import (
    Reshape,
    choose_tokens,
    count_tokens,
    explain_no_window,
    read_vocabulary,
    reshape_draft,
)
from paceline.quantize.schemes import SCHEMES, choose_scheme, describe_scheme
from paceline.quantize.target import quantize_target, round_target, write_target
from paceline.quantize.target_plan import TargetPlan, plan_target
from paceline.quantize.target_price import build_target_price

__all__ = [
    "SCHEMES",
    "Calibration",
    "CalibrationRow",
    "Distillation",
    "DraftPlan",
    "Moments",
    "Price",
    "Reshape",
    "TargetPlan",
    "build_price",
    "build_target_price",
    "check_rows",
    "choose_rows",
    "choose_scheme",
    "choose_tokens",
    "count_tokens",
    "describe_scheme",
    "distill_target",
    "explain_no_window",
    "hold_out_rows",
    "parse_share",
    "plan_draft",
    "plan_target",
    "quantize_draft",
    "quantize_target",
    "read_vocabulary",
    "require_distillable",
    "reshape_draft",
    "round_target",
    "write_target",
]
