"""The gated MLP of a layer: dense, or a mixture of experts, of which each token takes a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.routing import Routing, Scores
from alignedserve.engine.models.loading import Loader
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.dispatch.dispatcher import Kernels


class Mlp(Protocol):
    def add_to(self, x: Tensor, residual: Tensor) -> None:
        """Add the outputs of rows to the residual, in place."""


@dataclass(frozen=True)
class DenseMlp:
    up: Linear  # gate and up
    down: Linear
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.kernels.silu_mul(self.up(x)))

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        self.down.add_to(self.kernels.silu_mul(self.up(x)), residual)


def dense_mlp(loader: Loader, name: str, hidden: int, inner: int, is_summed: bool = True) -> DenseMlp:
    """Read an MLP by the names of the Llama family."""
    up = loader.by_rows([f"{name}.gate_proj", f"{name}.up_proj"], [inner] * 2, hidden, False)
    return DenseMlp(up, loader.by_columns(f"{name}.down_proj", hidden, inner, False, is_summed), loader.kernels)


@dataclass(frozen=True)
class Router:
    """Chooses the experts of each token, in fp32."""

    routing: Routing
    weight: Tensor  # [experts, hidden], fp32
    bias: Tensor | None  # [experts], fp32: counts in the choice alone

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each row, and their weights, both [rows, chosen]."""
        routing, logits = self.routing, F.linear(x.float(), self.weight)
        scores = logits.softmax(-1) if routing.scores is Scores.SOFTMAX else logits.sigmoid()
        wished = scores if self.bias is None else scores + self.bias
        if routing.groups > 1:
            wished = self._within_groups(wished)
        experts = wished.topk(routing.chosen, dim=-1, sorted=False).indices
        weights = scores.gather(1, experts)
        if routing.is_normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * routing.factor

    def _within_groups(self, wished: Tensor) -> Tensor:
        """Return the scores with those of all groups but the best hidden.

        A group counts as much as its best expert, or as its two best where experts have a bias.
        """
        routing = self.routing
        by_group = wished.unflatten(-1, (routing.groups, -1))
        worth = by_group.amax(-1) if self.bias is None else by_group.topk(2, dim=-1).values.sum(-1)
        best = worth.topk(routing.chosen_groups, dim=-1, sorted=False).indices
        is_hidden = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
        hidden: Tensor = by_group.masked_fill(is_hidden[..., None], -torch.inf)
        return hidden.flatten(-2)


@dataclass(frozen=True)
class ExpertsMlp:
    """A mixture of experts, and what all tokens take beside it. Each rank has a part of each expert."""

    router: Router
    experts: Sequence[DenseMlp]
    shared: DenseMlp | None
    total: Callable[[Tensor], None] | None  # sums the outputs over ranks

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        out = torch.zeros_like(x)
        self._add_experts(x, out)
        if self.shared is not None:
            self.shared.add_to(x, out)
        if self.total is not None:
            self.total(out)
        residual += out

    def _add_experts(self, x: Tensor, out: Tensor) -> None:
        """Add the outputs of each row's experts: the rows of one expert run together."""
        experts, weights = self.router(x)
        by_expert = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=len(self.experts)).tolist()
        rows = by_expert.div(experts.shape[1], rounding_mode="floor").split(counts)
        shares = weights.flatten().index_select(0, by_expert)[:, None].split(counts)
        for expert, of_expert, share in zip(self.experts, rows, shares, strict=True):
            if len(of_expert):
                made = expert(x.index_select(0, of_expert)) * share
                out.index_add_(0, of_expert, made.to(out.dtype))


def experts_mlp(loader: Loader, name: str, hidden: int, routing: Routing, inner: int, shared: int) -> ExpertsMlp:
    """Read a mixture of experts by the names of DeepSeek; `inner` and `shared` are sizes of this rank's parts."""

    def router() -> Router:
        weight = loader.vector(f"{name}.gate.weight", routing.experts, hidden, dtype=torch.float32)
        bias = f"{name}.gate.e_score_correction_bias"
        is_biased = routing.is_biased
        return Router(routing, weight, loader.vector(bias, routing.experts, dtype=torch.float32) if is_biased else None)

    def mlp(of: str, size: int) -> DenseMlp:
        return dense_mlp(loader, f"{name}.{of}", hidden, size, is_summed=False)

    return ExpertsMlp(
        router(),
        [mlp(f"experts.{number}", inner) for number in range(routing.experts)],
        mlp("shared_experts", shared) if shared else None,
        loader.ranks.total if loader.ranks.size > 1 else None,
    )
