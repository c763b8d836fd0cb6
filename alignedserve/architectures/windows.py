"""The windows of a model that transformers runs, as its config.json tells them before it is loaded."""

from __future__ import annotations

from alignedserve.architectures.given import Given

_IN_ALL_LAYERS = {"ministral", "ministral3", "phimoe", "starcoder2"}  # by model_type
# Families whose older files name no types: every fourth layer of cohere2 has no window.
_PATTERN = {"cohere2": 4}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def windows_of(text: Given, layers: int, positions: int) -> tuple[int | None, ...]:
    """Return the window of each layer; () where config.json names none, or does not say which layers have it.

    The engine compares it with what the layers read when it loads the model (engine/models/transformers_checks.py).
    """
    types = text.get("layer_types") or _usual_types(text, layers)
    if text.get("sliding_window") is None or text.get("use_sliding_window") is False or not isinstance(types, list):
        return ()
    if len(types) != layers or not {*types} <= {_SLIDING, _FULL} or _SLIDING not in types:
        return ()
    size = text.whole("sliding_window")
    return tuple(size if kind == _SLIDING else None for kind in types) if size < positions else ()


def _usual_types(text: Given, layers: int) -> list[str] | None:
    family = text.get("model_type")
    if family in _IN_ALL_LAYERS:
        return [_SLIDING] * layers
    if family not in _PATTERN:
        return None
    every = text.whole("sliding_window_pattern", _PATTERN[family])
    return [_SLIDING if (layer + 1) % every else _FULL for layer in range(layers)]
