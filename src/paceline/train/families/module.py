"""What the loop and the replay ask of a draft's module, whatever its family.

Shapes: B rows, T tokens, F features, N bases a row, D draft hidden, V vocabulary, K steps.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["DraftModule"]


class DraftModule(nn.Module):
    """A draft. `state_dict()` names are the names in model.safetensors."""

    def output_heads(self, target_head_VD: Tensor) -> list[Tensor]:
        """The output matrix that all K steps share, or K of them; here the target's."""
        return [target_head_VD]

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft's own vocabulary as the target's; here they are the same."""
        return draft_ids

    def unroll(
        self,
        tokens_BT: Tensor,
        features_BTF: Tensor,
        bases_BN: Tensor,
        embedding_VD: Tensor,
        *,
        num_steps: int,
        head_VD: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """K steps from every base: (states that the output matrices read [B,N,D], ids [B,N]).

        bases_BN: positions t whose next token x[t+1] is known; step j predicts x[t+2+j].
        features_BTF: the target's tapped layers side by side, or its state after the final norm.
        Without head_VD later steps read the text's own tokens (training) and no ids come back;
        with it (the target's, or the first of the draft's own) they read what was just proposed.
        """
        raise NotImplementedError
