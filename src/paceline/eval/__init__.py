"""Measures served drafts: acceptance, memory, time, fidelity, and the score with its intervals."""

from __future__ import annotations

from paceline.eval.asking import EvalPrompt
from paceline.eval.bench import (
    REGIMES,
    Ask,
    Regime,
    ask_endpoint,
    build_bench_requests,
    compare_arms,
    measure_arm,
)
from paceline.eval.compare import compare_runs
from paceline.eval.conversing import Converse, Reply, converse_endpoint, converse_server
from paceline.eval.cycles import Cycles, measure_cycles
from paceline.eval.harness import BUNDLED_QUESTIONS, AskedQuestion, ask_task, hash_questions
from paceline.eval.noise import (
    add_noise_floor,
    find_noise_floor,
    keep_noise_floor,
    measure_noise_floor,
)
from paceline.eval.openai_server import ask_server, complete_ids, find_model
from paceline.eval.quality_record import QUALITY_FORMAT, build_quality
from paceline.eval.result import add_replay, write_result
from paceline.eval.run import measure_run
from paceline.eval.run_texts import find_text_faults
from paceline.eval.samples import build_samples
from paceline.eval.score import score_run
from paceline.eval.together import measure_together
from paceline.eval.transcript import read_answers

__all__ = [
    "BUNDLED_QUESTIONS",
    "QUALITY_FORMAT",
    "REGIMES",
    "Ask",
    "AskedQuestion",
    "Converse",
    "Cycles",
    "EvalPrompt",
    "Regime",
    "Reply",
    "add_noise_floor",
    "add_replay",
    "ask_endpoint",
    "ask_server",
    "ask_task",
    "build_bench_requests",
    "build_quality",
    "build_samples",
    "compare_arms",
    "compare_runs",
    "complete_ids",
    "converse_endpoint",
    "converse_server",
    "find_model",
    "find_noise_floor",
    "find_text_faults",
    "hash_questions",
    "keep_noise_floor",
    "measure_arm",
    "measure_cycles",
    "measure_noise_floor",
    "measure_run",
    "measure_together",
    "read_answers",
    "score_run",
    "write_result",
]
