"""Terminal tables and HTML pages out of a run folder's JSON; needs no GPU stack."""

from __future__ import annotations

from paceline.report.comparison import render_comparison
from paceline.report.frontier_plot import draw_frontier
from paceline.report.leaderboard import list_ranked
from paceline.report.leaderboard_page import write_leaderboard
from paceline.report.leaderboard_read import read_submissions
from paceline.report.page import build_page, write_report
from paceline.report.pdf import write_pdf
from paceline.report.phase_page import build_phase_page, write_phase_page
from paceline.report.price import render_price
from paceline.report.quality import render_quality
from paceline.report.scaling_plot import draw_scaling
from paceline.report.terminal import print_report, render_score_table

__all__ = [
    "build_page",
    "build_phase_page",
    "draw_frontier",
    "draw_scaling",
    "list_ranked",
    "print_report",
    "read_submissions",
    "render_comparison",
    "render_price",
    "render_quality",
    "render_score_table",
    "write_leaderboard",
    "write_pdf",
    "write_phase_page",
    "write_report",
]
