"""Conversations that the demo model was not trained on, with the one right answer to each: 20 of each of 16 kinds.

The generator of its training data wrote them. docs/guides/models.md says at which commit that is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_suffix(".jsonl")


@dataclass(frozen=True)
class Conversation:
    kind: str
    messages: list[dict[str, str]]
    answer: str


def conversations() -> list[Conversation]:
    """Return all of them: one of each kind, then another of each kind, and so on."""
    return [Conversation(**json.loads(line)) for line in _FILE.read_text(encoding="utf-8").splitlines()]
