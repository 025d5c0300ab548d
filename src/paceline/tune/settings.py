"""One way to serve a target, as far as tuning may change it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from paceline.errors import ResultError

__all__ = ["Settings", "read_settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """draft: a folder, a bundled name, native, ngram, suffix or none; k: None is the draft's own.

    drafter_window: tokens that the draft's attention looks back. compiled: not eager (on a GPU with
    CUDA graphs). cudagraph_sizes, async_scheduling, gdn_prefill_backend, gdn_decode_kernel and
    stream_interval: None leaves vLLM's choice. dynamic_k: (from, to, K) by batch size. http: asked
    through vLLM's own server, streamed as text.
    """

    draft: str = "none"
    k: int | None = None
    drafter_window: int | None = None
    compiled: bool = False
    prefix_caching: bool = False
    async_scheduling: bool | None = None
    cudagraph_sizes: tuple[int, ...] | None = None
    gdn_prefill_backend: str | None = None
    gdn_decode_kernel: str | None = None
    dynamic_k: tuple[tuple[int, int, int], ...] | None = None
    http: bool = False
    stream_interval: int | None = None

    @property
    def key(self) -> str:
        """The same for the same settings, on every run."""
        return json.dumps(asdict(self), sort_keys=True)

    def without_draft(self) -> Settings:
        return replace(self, draft="none", k=None, drafter_window=None, dynamic_k=None)


def read_settings(found: Mapping[str, Any]) -> Settings:
    """Settings out of a record. Raises ResultError for a name that is none of them."""
    unknown = sorted(set(found) - {field.name for field in fields(Settings)})
    if unknown:
        raise ResultError(f"setting {unknown[0]!r} is unknown", fix="Tune again with this version.")
    values = dict(found)
    if values.get("cudagraph_sizes") is not None:
        values["cudagraph_sizes"] = tuple(values["cudagraph_sizes"])
    if values.get("dynamic_k") is not None:
        values["dynamic_k"] = tuple(tuple(row) for row in values["dynamic_k"])
    return Settings(**values)
