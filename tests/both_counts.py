"""A worker that lets vLLM's own Prometheus logger count beside ours, in the same engine process."""

from __future__ import annotations

import inspect
from typing import Any

from paceline.serve.inspector import Inspector


class BothCounts(Inspector):
    """For a CPU's engine, which is in one process with its worker."""

    def paceline_count_twice(self) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        (engine,) = {
            value
            for frame in inspect.stack()  # the call comes through it
            for value in frame.frame.f_locals.values()
            if isinstance(value, LLMEngine)
        }
        manager = engine.logger_manager
        assert manager is not None
        manager.stat_loggers = [*manager.stat_loggers, PrometheusStatLogger(engine.vllm_config)]

    def paceline_vllm_counters(self) -> dict[str, Any]:
        """vLLM's metrics by name, without its prefix."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return {
            metric.name.removeprefix("vllm:"): getattr(
                metric, "values", getattr(metric, "value", None)
            )
            for metric in get_metrics_snapshot()
        }
