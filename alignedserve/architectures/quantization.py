"""Name the ways to keep the weights of linear layers: as they are, or quantised while they are loaded."""

from __future__ import annotations

from enum import Enum

GROUP = 64  # inputs that share a scale and a zero, with 4 bits; with 8 bits all inputs of an output do
_OF_GROUP = 4  # bytes of a scale and a zero


class Quantization(str, Enum):
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"  # the output head has 8 bits

    @property
    def bits(self) -> int | None:
        """Return the bits of a weight in a layer, or None where weights stay as they are."""
        return {"int8": 8, "int4": 4}.get(self.value)

    def num_bytes(self, layers: int, embedding: int, head: int, whole: int) -> int:
        """Return the bytes of weights: so many numbers in layers, in an embedding of its own, and in the head; each
        has `whole` bytes where it stays as it is."""
        match self:
            case Quantization.NONE:
                return (layers + embedding + head) * whole
            case Quantization.INT8:
                return layers + head + embedding * whole
            case Quantization.INT4:
                return layers // 2 + layers * _OF_GROUP // GROUP + head + embedding * whole
