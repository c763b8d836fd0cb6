"""What a model is to the engine, and the engine to a model.

A model knows its weights and nothing of requests: it runs the concatenated tokens of a step, and asks the step's
attention for everything that depends on which request a token belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from alignedserve.kernels.common.decoder import Paged
from alignedserve.kernels.common.linear import Linear


class Attention(Protocol):
    """A step's: where its tokens' K and V go, and what they attend to."""

    @property
    def paged(self) -> Paged | None:
        """Where they go, if K and V of all its tokens are kept and nothing else: then kernels may attend."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Keeps the step's K and V, [rows, kv_dim], and attends with query [rows, heads, head_dim]: the same shape.

        `hidden` are the vectors that k and v were made of, [rows, hidden_size]: what is kept of requests of the kind
        HIDDEN. A model without `project` leaves it out. All may be strided in all but the last dimension.
        """


class Model(Protocol):
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, attention: Attention
    ) -> torch.Tensor:
        """Logits in fp32 of the tokens at `rows`, of all where that is None.

        `positions` are those of each token in its request. Layers are numbered as in the device cache.
        """

    def project(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, [tokens, kv_dim] each, of tokens at these positions, from what was kept of them.

        Asked only of a model whose configuration has no `why_not_hidden`.
        """


MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]  # of a weight [outputs, inputs] and a bias
