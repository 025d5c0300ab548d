"""What a search chose, as a file that `paceline serve --config` reads."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.records import write_text
from paceline.tune.settings import Settings

__all__ = ["write_config"]

_OPTIONAL = (
    "async_scheduling",
    "cudagraph_sizes",
    "gdn_prefill_backend",
    "gdn_decode_kernel",
    "dynamic_k",
    "stream_interval",
)


def write_config(
    path: Path, settings: Settings, *, k: int | None, break_even: float | None, title: str
) -> None:
    """Writes a TOML file. k: the drafted tokens a step that were served.

    settings: a draft with another window is named as the folder that was made of it.
    break_even: acceptance length below which the draft costs more than it saves.
    """
    lines = [f"# {title}", ""]
    if settings.draft != "none":
        lines.append(f"draft = {json.dumps(settings.draft)}")
        if k is not None:
            lines.append(f"k = {k}")
        if break_even is not None:
            lines.append("# measured: at this acceptance length the draft gains nothing")
            lines.append(f"min_acceptance = {max(1.0, break_even):.3f}")
    lines += ["", "[engine]"]
    lines.append(f"compiled = {json.dumps(settings.compiled)}")
    lines.append(f"prefix_caching = {json.dumps(settings.prefix_caching)}")
    for name in _OPTIONAL:
        value = getattr(settings, name)
        if value is not None:
            lines.append(f"{name} = {json.dumps(value)}")
    write_text(path, "\n".join(lines) + "\n")
