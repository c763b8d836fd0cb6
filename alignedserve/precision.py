"""How this process keeps the weights of its model, and what that costs, in words: for /status and `LLM.weights`."""

from __future__ import annotations

_said = ""


def keeps(words: str) -> None:
    """Say how weights are kept."""
    global _said
    _said = words


def kept() -> str:
    """Return what was said; empty in a process without weights."""
    return _said
