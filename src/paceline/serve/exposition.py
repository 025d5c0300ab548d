"""The front's own numbers as Prometheus metrics, beside vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["FrontMetrics", "read_sample"]


def read_sample(metrics: str, name: str) -> float | None:
    """Sum over the labels of one metric in Prometheus text; None where there is none."""
    total: float | None = None
    for line in metrics.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            total = (total or 0.0) + float(line.rpartition(" ")[2])
    return total


class FrontMetrics:
    """Counters and gauges named paceline_*; `show` gives the text of /metrics."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self.registry: CollectorRegistry = CollectorRegistry()
        self.requests = Counter(
            "paceline_requests",
            "Requests by category and outcome: answered, refused, failed, gone (client left).",
            ["category", "outcome"],
            registry=self.registry,
        )
        self.held = Gauge(
            "paceline_requests_held", "Requests asked or waiting.", registry=self.registry
        )
        self.asked_again = Counter(
            "paceline_requests_asked_again",
            "Unanswered requests asked of another server.",
            registry=self.registry,
        )
        self.continued = Counter(
            "paceline_streams_continued",
            "Streams continued from the tokens sent.",
            registry=self.registry,
        )
        self.lost = Counter(
            "paceline_servers_lost", "vLLM servers that died or hung.", registry=self.registry
        )
        self.switches = Counter(
            "paceline_switches",
            "Changes of the server, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.draft_on = Gauge(
            "paceline_draft_on", "1 while answers are drafted.", registry=self.registry
        )
        self.draft_helps = Gauge(
            "paceline_draft_helps",
            "0 once acceptance is below the minimum.",
            registry=self.registry,
        )
        self.minimum = Gauge(
            "paceline_acceptance_length_minimum",
            "Below it a draft does not help.",
            registry=self.registry,
        )
        self.length = Gauge(
            "paceline_acceptance_length",
            "1 + accepted / steps over the last steps, bonus token included; * is all.",
            ["category"],
            registry=self.registry,
        )

    def show(self) -> str:
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()
