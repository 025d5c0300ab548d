"""What the loop and the replay ask of a draft's module, whatever its family.

Shapes: B rows, T tokens, F features, N bases a row, D draft hidden, V vocabulary, K steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.train.families.layers import Linear

__all__ = ["DraftModule", "TappedDraft"]


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
        places_BT: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """K steps from every base: (states that the output matrices read [B,N,D], ids [B,N]).

        bases_BN: positions t whose next token x[t+1] is known; step j predicts x[t+2+j].
        places_BT: where each token stands in its own text, when several stand in one row, one after
        the other; no base then sees another text than its own.
        features_BTF: the target's tapped layers side by side, or its state after the final norm.
        Without head_VD later steps read the text's own tokens (training) and no ids come back;
        with it (the target's, or the first of the draft's own) they read what was just proposed.
        """
        raise NotImplementedError


class TappedDraft(DraftModule):
    """A draft on the target's tapped layers; its ends are the target's, or some are its own.

    lm_head, d2t: the output matrix of a vocabulary of its own and that vocabulary, both None where
    it has none. own_embedding_VD, own_head_VD: what a folder from elsewhere holds in place of the
    target's (`adopt_ends`); no part of what is trained or written.
    """

    d2t: Tensor | None
    own_embedding_VD: Tensor | None
    own_head_VD: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.lm_head: Linear | None = None
        self.register_buffer("d2t", None)
        self.register_buffer("own_embedding_VD", None, persistent=False)
        self.register_buffer("own_head_VD", None, persistent=False)

    def open_vocabulary(self, width: int, rows: int) -> None:
        """Makes room for a vocabulary of the draft's own."""
        self.lm_head = Linear(width, rows, bias=False)
        self.d2t = torch.zeros(rows, dtype=torch.int64)

    def adopt_ends(self, tensors: dict[str, Tensor]) -> None:
        """Takes out of a folder's tensors the ends that a draft of ours shares with its target.

        Others write embeddings, and an output matrix of the whole vocabulary, into the draft; vLLM
        then reads those.
        """
        self.own_embedding_VD = tensors.pop("embed_tokens.weight", None)
        if self.lm_head is None:
            self.own_head_VD = tensors.pop("lm_head.weight", None)

    def embeddings(self, target_embedding_VD: Tensor) -> Tensor:
        """What tokens are read by."""
        own = self.own_embedding_VD
        return target_embedding_VD if own is None else own

    def output_heads(self, target_head_VD: Tensor) -> list[Tensor]:
        if self.lm_head is not None:
            return [self.lm_head.weight]
        return [target_head_VD if self.own_head_VD is None else self.own_head_VD]

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """d2t is an offset: target id = i + d2t[i]."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]
