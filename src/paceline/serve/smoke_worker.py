"""Runs inside vLLM's worker during `paceline validate --run`: looks at the draft's own logits.

Loaded through `worker_extension_cls` in place of the plain inspector. It watches one method of the
loaded draft; what the engine computes is not changed.
"""

from __future__ import annotations

from typing import Any

from paceline.serve.inspector import Inspector, _draft_model

__all__ = ["SmokeInspector"]


class SmokeInspector(Inspector):
    """The inspector, and a count of the draft's logits that are no numbers."""

    def paceline_watch(self) -> dict[str, Any]:
        """Begins to look at the draft's logits, and names what the draft was resolved to."""
        runner = self.model_runner  # type: ignore[attr-defined]
        draft = _draft_model(runner)
        self.paceline_seen = {"num_rows": 0, "num_bad_rows": 0, "largest": 0.0}
        if draft is None:
            return {"watched": False, "architectures": []}
        compute = draft.compute_logits

        def watched(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            if logits is not None:
                self._paceline_count(logits)
            return logits

        draft.compute_logits = watched
        config = runner.vllm_config.speculative_config.draft_model_config.hf_config
        return {"watched": True, "architectures": list(config.architectures or [])}

    def paceline_logits(self) -> dict[str, Any]:
        """Rows seen since `paceline_watch`, rows with NaN or infinity, and the largest value."""
        return dict(self.paceline_seen)

    def _paceline_count(self, logits: Any) -> None:
        import torch

        # a draft with fewer words than the target has -inf where it has no word
        bad = torch.isnan(logits) | (logits == float("inf"))
        empty = torch.isneginf(logits).all(dim=-1)
        finite = logits.masked_fill(~torch.isfinite(logits), 0.0)
        seen = self.paceline_seen
        seen["num_rows"] += int(logits.shape[0])
        seen["num_bad_rows"] += int((bad.any(dim=-1) | empty).sum())
        seen["largest"] = max(seen["largest"], float(finite.abs().max()) if finite.numel() else 0.0)
