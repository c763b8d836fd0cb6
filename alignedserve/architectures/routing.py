"""Mixtures of experts: how tokens choose among the experts of a layer, and the sizes of a model that has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from alignedserve.architectures.config import OurConfig


class Scores(Enum):
    """How the numbers of a token's experts become their scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class Stack(Enum):
    """How the files stack all experts of a layer, and where gate and up of an expert lie in its rows."""

    HALVES = "halves"  # all of the gate before all of up
    IN_TURN = "in turn"  # a number of the gate, then one of up


@dataclass(frozen=True, kw_only=True)
class Clamp:
    """Gate and up are clamped, and then made to (up + 1) * gate * sigmoid(slope * gate)."""

    limit: float
    slope: float


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What the files call the parts of a layer's mixture."""

    router: str = "mlp.gate"
    bias: str = "mlp.gate.e_score_correction_bias"  # of the choice
    experts: str = "mlp.experts"  # the number of an expert comes after it
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str | None = None  # one weight of both, the gate first; None: they have one each
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, kw_only=True)
class Routing:
    experts: int  # of a layer
    chosen: int  # experts of a token
    scores: Scores
    dense_layers: frozenset[int] = frozenset()  # layers without experts
    groups: int = 1  # of neighbouring experts
    chosen_groups: int = 1  # groups from which a token may choose
    is_biased: bool = False  # whether each expert has a number that counts in the choice, and not in its weight
    is_normalised: bool = False  # whether a token's weights sum to one, before the factor
    factor: float = 1.0  # of the weights
    weighs_inputs: bool = False  # whether a weight is a factor of what an expert reads, not of what it makes
    shared_is_gated: bool = False  # whether each token has a weight for what all tokens take
    has_biases: bool = False  # whether the router and all layers of experts have a bias
    clamp: Clamp | None = None  # of gate and up of experts
    stack: Stack | None = None  # None: the files have each expert by itself
    names: ExpertNames = field(default_factory=ExpertNames)


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(OurConfig):
    """The shapes of a model whose layers may have experts in place of a dense MLP."""

    routing: Routing | None = None  # None: all layers are dense
    expert_size: int = 0  # the inner size of an expert
    shared_size: int = 0  # the inner size of what all tokens take beside their experts

    @property
    def divided(self) -> tuple[str, ...]:
        sizes = ("expert_size", "shared_size") if self.has_experts else ()
        return (*super().divided, *sizes)

    @property
    def has_experts(self) -> bool:
        return self.routing is not None

    def routing_of(self, layer: int) -> Routing | None:
        """Return how tokens choose among the layer's experts; None where it is dense."""
        routing = self.routing
        return None if routing is None or layer in routing.dense_layers else routing

    @property
    def inner_size(self) -> int:
        dense = 3 * self.intermediate_size  # gate, up and their product
        if self.routing is None:
            return dense
        of_experts = 3 * self.routing.chosen * self.hidden_size  # rows: taken, made and in order
        return max(dense, 3 * max(self.expert_size, self.shared_size) + of_experts)

    @property
    def _numbers_of_mlps(self) -> int:
        each = 3 * self.hidden_size  # gate, up and down
        dense, mixed = each * self.intermediate_size, 0
        if self.routing is not None:
            mixed = each * (self.routing.experts * self.expert_size + self.shared_size) + self._numbers_of_router
        return sum(dense if self.routing_of(layer) is None else mixed for layer in range(self.num_layers))

    @property
    def plain_numbers(self) -> int:
        return self.num_layers * self._numbers_of_router

    @property
    def numbers_on_all_ranks(self) -> int:
        return self.num_layers * self._numbers_of_router

    @property
    def _numbers_of_router(self) -> int:
        outputs = 0 if self.routing is None else self.routing.experts + self.routing.shared_is_gated
        return self.hidden_size * outputs
