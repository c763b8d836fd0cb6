"""What encoders share: all texts of a step run at once, as rows of one batch, and nothing is padded.

Each token is a row with its position in its own text, so linear layers run over all tokens at once. Attention is by
text. Nothing is kept between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.config import Activation
from alignedserve.engine.models.activations import ACTIVATIONS
from alignedserve.engine.models.loading import Loader
from alignedserve.kernels.common.spans import TextRows
from alignedserve.kernels.dispatch.dispatcher import Kernels

# Rows that go through the layers behind attention together: what these hand on to each other stays in the caches.
ROWS_AT_ONCE = 1024

TextHead = Callable[[Tensor], Tensor]  # from the state of each text that counts, in fp32, to its numbers


@dataclass(frozen=True)
class Text:
    """The tokens of a text, or of a pair whose second text begins at `second_at`."""

    tokens: Sequence[int]
    second_at: int | None = None

    @property
    def segments(self) -> list[int]:
        length = len(self.tokens)
        first = length if self.second_at is None else min(self.second_at, length)
        return [0] * first + [1] * (length - first)


@dataclass(frozen=True)
class TextInputs:
    """The texts of a step, one after the other: each tensor has a number for each row."""

    tokens: Tensor
    positions: Tensor
    segments: Tensor  # 1 in the second text of a pair
    rows: TextRows

    @classmethod
    def of(cls, texts: Sequence[Text], device: torch.device) -> TextInputs:
        lengths = [len(text.tokens) for text in texts]
        return cls(
            torch.tensor([token for text in texts for token in text.tokens]).to(device),
            torch.cat([torch.arange(length) for length in lengths]).to(device),
            torch.tensor([segment for text in texts for segment in text.segments]).to(device),
            TextRows(lengths),
        )


class EncoderModel(Protocol):
    """The module of a family of encoders."""

    @property
    def head(self) -> TextHead | None:
        """Return the head that makes the numbers of whole texts, if the model has one."""

    def run(self, inputs: TextInputs) -> Tensor:
        """Return the states of all rows, [rows, hidden_size]."""


class Encoder:
    """An encoder as the engine runs it."""

    def __init__(self, model: EncoderModel, device: torch.device) -> None:
        self.model, self._device = model, device

    @property
    def head(self) -> TextHead | None:
        return self.model.head

    def states(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return the states of each text's tokens, [tokens, hidden_size]."""
        # The shortest first: the reference kernel attends to texts of one length together.
        order = sorted(range(len(texts)), key=lambda number: len(texts[number].tokens))
        inputs = TextInputs.of([texts[number] for number in order], self._device)
        found = self.model.run(inputs)
        states: list[Tensor] = [found] * len(texts)
        for number, own in zip(order, found.split(inputs.rows.lengths), strict=True):
            states[number] = own
        return states


def gelu_of(activation: Activation, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """Return the activation: the kernels' own where they have it."""
    return kernels.gelu if activation is Activation.GELU else ACTIVATIONS[activation]


def head_layer(name: str, outputs: int, inputs: int, loader: Loader, bias: bool = True) -> Callable[[Tensor], Tensor]:
    """Return a layer of a head for whole texts: it runs once a text, so in fp32."""
    weight = loader.vector(f"{name}.weight", outputs, inputs, dtype=torch.float32)
    biases = loader.vector(f"{name}.bias", outputs, dtype=torch.float32) if bias else None
    return partial(F.linear, weight=weight, bias=biases)
