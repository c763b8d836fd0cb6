"""The windows of a model that transformers runs, as its config.json tells them before it is loaded."""

from __future__ import annotations

from alignedserve.architectures.given import Given

_IN_ALL_LAYERS = {"ministral", "ministral3", "phi3", "phimoe", "starcoder2"}  # by model_type
_SLIDING = "sliding_attention"


def windows_of_all(text: Given, layers: int, positions: int) -> tuple[int, ...]:
    """Return the window of each layer; () unless every layer has one and config.json names it.

    The engine compares it with what the layers read when it loads the model (engine/models/transformers_checks.py).
    """
    window, types = text.get("sliding_window"), text.get("layer_types")
    is_in_all = text.get("model_type") in _IN_ALL_LAYERS if types is None else types == [_SLIDING] * layers
    if window is None or not is_in_all or text.get("use_sliding_window") is False:
        return ()
    size = text.whole("sliding_window")
    return (size,) * layers if size < positions else ()
