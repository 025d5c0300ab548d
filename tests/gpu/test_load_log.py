"""The load log on a real GPU: clocks, power and temperature while it works. Seconds."""

from __future__ import annotations

import shutil
import time

import pytest

from paceline.eval.load import watch_load

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi here"),
]


def test_clocks_are_logged_while_the_gpu_works() -> None:
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with watch_load(gpu=True) as watch:
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            for _ in range(50):
                matrix @ matrix
            torch.cuda.synchronize()
    gpu = watch.record["gpu"]
    print(gpu)
    assert gpu is not None
    assert gpu["num_readings"] >= 10
    assert 300 < gpu["min_sm_mhz"] <= gpu["sm_mhz"] < 4000
    assert 20 < gpu["max_temperature_c"] < 110
    assert gpu["mean_power_w"] > 50
    assert 0 <= gpu["throttled_share"] <= 1
