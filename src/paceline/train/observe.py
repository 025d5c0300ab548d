"""A draft at work on the target's own answers, watched: what each of its matrices reads.

The text of a row is drafted from as when served: K tokens from every place of the answer, each step
on the tokens just proposed. Whoever calibrates a quantisation reads these inputs; nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.data import Row
from paceline.draft import Draft
from paceline.errors import DataError
from paceline.target import TargetFacts

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["DraftRun", "open_draft_run"]


class DraftRun:
    """Rows whose target features are computed once; the draft may run over them again and again."""

    def __init__(
        self,
        draft: Draft,
        module: nn.Module,
        rows: Sequence[Row],
        features: Sequence[Tensor],
        embedding_VD: Tensor,
        head_VD: Tensor,
    ) -> None:
        self._draft, self._module = draft, module
        self._rows, self._features = list(rows), list(features)
        self._embedding_VD, self._head_VD = embedding_VD, head_VD

    def observe(
        self, seen: Callable[[str, str, Tensor], None], weights: Mapping[str, Tensor]
    ) -> None:
        """Calls seen(row id, module, inputs [N, C]) for every matrix of the draft, row by row.

        weights: tensors that stand in the draft from now on. "lm_head" reads what the draft's
        last norm gives, whether the output matrix is the draft's own or the target's.
        """
        import torch
        from torch import nn

        from paceline.train.batches import build_batch

        module: Any = self._module
        module.load_state_dict(dict(weights), strict=False)
        current = ""

        def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                seen(current, name, inputs[0].flatten(0, -2))

            return before

        hooks = [
            part.register_forward_pre_hook(watch(name))
            for name, part in module.named_modules()
            if isinstance(part, nn.Linear) and not name.startswith("lm_head")
        ]
        try:
            for row, taps_BTF in zip(self._rows, self._features, strict=True):
                current = row.row_id
                batch = build_batch([[row]], num_speculative_tokens=1)
                device = self._embedding_VD.device
                with torch.no_grad():
                    states, _ = module.unroll(
                        batch.tokens_BT.to(device),
                        taps_BTF,
                        batch.bases_BN.to(device),
                        self._embedding_VD,
                        num_steps=self._draft.num_speculative_tokens,
                        head_VD=module.output_heads(self._head_VD)[0],
                    )
                for state_BND in states:
                    seen(current, "lm_head", state_BND.flatten(0, -2))
        finally:
            for hook in hooks:
                hook.remove()


def open_draft_run(
    draft: Draft,
    target: TargetFacts,
    rows: Sequence[Row],
    *,
    where: str,
    device: str = "cpu",
    dtype: str = "bfloat16",
    on_row: Callable[[int, int], None] | None = None,
) -> DraftRun:
    """Runs the target once over each row. where: the rows' file, for messages.

    Raises DataError naming the first row on which the target's states are not finite numbers,
    before the draft runs at all; DraftError, TargetError, RecipeError for a draft or target that
    cannot run here.
    """
    import torch

    from paceline.train.families.table import get_family
    from paceline.train.features import load_frozen_target
    from paceline.train.replay import load_draft_module

    module = load_draft_module(draft).to(device)
    taps = get_family(draft.family).tapped_layers(draft.config)
    frozen = load_frozen_target(
        target, device=device, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32
    )
    features: list[Tensor] = []
    for number, row in enumerate(rows, 1):
        tokens_BT = torch.tensor([list(row.input_ids)], device=device)
        found = frozen.features(tokens_BT, taps).taps_BTF
        if not bool(found.isfinite().all()):
            raise DataError(
                f"the target's states of row '{row.row_id}' are not all finite numbers",
                where=where,
                expected="numbers in every tapped layer",
                fix="Check the target's weights (`paceline target show`), or leave the row out.",
            )
        features.append(found)
        if on_row is not None:
            on_row(number, len(rows))
    return DraftRun(draft, module, rows, features, frozen.embedding_VD, frozen.head_VD)
