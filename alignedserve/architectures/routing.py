"""How tokens choose among the experts of a layer, in mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scores(Enum):
    """How the numbers of a token's experts become their scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, kw_only=True)
class Routing:
    experts: int  # of a layer
    chosen: int  # experts of a token
    first_layer: int  # the first layer that has experts; those before it are dense
    scores: Scores
    groups: int = 1  # of neighbouring experts
    chosen_groups: int = 1  # groups from which a token may choose
    is_biased: bool = False  # whether each expert has a number that counts in the choice, and not in its weight
    is_normalised: bool = False  # whether a token's weights sum to one, before the factor
    factor: float = 1.0  # of the weights
