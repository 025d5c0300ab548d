"""The load log against real processes, and against lines as nvidia-smi writes them."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
from scripted import build_rules

from paceline.eval.load import find_disturbance, parse_gpu_log, watch_load

RULES = build_rules(max_other_cpu_share="0.2", max_clock_difference="0.01")
_SPIN = "import time; end = time.time() + 30\nwhile time.time() < end: pass"


def spin() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _SPIN])


def test_our_own_children_are_not_others_and_others_are() -> None:
    """One real process at work, once counted as ours and once as somebody else's."""
    process = spin()
    try:
        with watch_load() as ours, watch_load(root=process.pid) as theirs:
            time.sleep(1.7)
    finally:
        process.kill()
        process.wait()
    for watch in (ours, theirs):
        assert watch.record["num_readings"] >= 2
        assert watch.record["seconds"] > 1.6
        assert 0 < watch.record["busy_share"] <= 1
        assert watch.record["gpu"] is None
    assert ours.record["other_share"] < ours.record["busy_share"]
    # the spinning process belongs to both trees; a tree that lacks it sees it as another's
    with watch_load(root=2**22 + 1) as strangers:
        other = spin()
        time.sleep(1.7)
        other.kill()
        other.wait()
    assert strangers.record["other_share"] > 0.1
    assert strangers.record["max_other_share"] >= strangers.record["other_share"]


def test_a_block_of_no_length_has_no_reading() -> None:
    with watch_load() as watch:
        pass
    assert watch.record["other_share"] is None
    assert find_disturbance(watch.record, None, RULES) is None


# nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active
STEADY = "1980, 3201, 41, 512.30, 0x0000000000000004\n" * 3
COOLER = "1955, 3201, 41, 498.10, 0x0000000000000000\n" * 4
HOT = "1980, 3201, 41, 512.30, 0x0\n1410, 3201, 90, 700.00, 0x0000000000000040\n"


def test_gpu_log() -> None:
    found = parse_gpu_log(STEADY + "[N/A], 3201, 41, 512.30, 0x4\nnonsense\n" + "1900, 3201, 45,")
    assert found is not None
    assert (found["num_readings"], found["sm_mhz"], found["max_temperature_c"]) == (3, 1980, 41)
    assert found["throttled_share"] == 0.0  # 0x4 is the power cap, the usual state under load
    assert parse_gpu_log("") is None
    hot = parse_gpu_log(HOT)
    assert hot is not None
    assert (hot["throttled_share"], hot["min_sm_mhz"]) == (0.5, 1410)


def load(other: float | None = 0.0, gpu: str | None = None) -> dict[str, Any]:
    return {"other_share": other, "gpu": parse_gpu_log(gpu) if gpu else None}


@pytest.mark.parametrize(
    ("own", "pair", "reason"),
    [
        (load(0.2), None, None),  # the edge itself
        (load(0.21), None, "other processes took 21% of the CPU, at most 20% may be"),
        (load(gpu=STEADY), load(gpu=STEADY), None),
        (load(gpu=HOT), None, "the GPU slowed itself down in 50% of the readings"),
        (load(gpu=COOLER), load(gpu=STEADY), "the GPU's clock was 1.3% off the other arm's"),
        (load(gpu=COOLER), load(), None),
        (load(gpu=COOLER), None, None),
    ],
)
def test_what_disturbs_a_block(own: Any, pair: Any, reason: str | None) -> None:
    assert find_disturbance(own, pair, RULES) == reason
