"""Name the ways to keep the weights of linear layers: as they are, or quantised while they are loaded."""

from __future__ import annotations

from enum import Enum

GROUP = 32  # inputs of an output that share a scale, and with 4 bits a zero
_OF_SCALE = 2  # bytes of a scale, or of a zero


def group_of(inputs: int) -> int:
    """Return how many inputs of a layer share a scale: all where they are few, so ranks may cut them anywhere."""
    return GROUP if inputs > 2 * GROUP else inputs


class Quantization(str, Enum):
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"  # the output head has 8 bits

    @property
    def bits(self) -> int | None:
        """Return the bits of a weight in a layer, or None where weights stay as they are."""
        return {"int8": 8, "int4": 4}.get(self.value)

    def num_bytes(self, layers: int, embedding: int, head: int, whole: int) -> int:
        """Return the bytes of all weights. The arguments count the numbers in layers, in an embedding of its own, and
        in the head; a number that is not quantised has `whole` bytes."""
        match self:
            case Quantization.NONE:
                return (layers + embedding + head) * whole
            case Quantization.INT8:
                return layers + head + (layers + head) * _OF_SCALE // GROUP + embedding * whole
            case Quantization.INT4:
                of_layers = layers // 2 + layers * 2 * _OF_SCALE // GROUP
                return of_layers + head + head * _OF_SCALE // GROUP + embedding * whole
