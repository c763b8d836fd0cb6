"""The language in which a format says how one of its calls is written, for a grammar that an output must follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

Schema: TypeAlias = Mapping[str, Any]


class GrammarWriter(Protocol):
    """Writes the parts of a rule."""

    def text(self, literal: str) -> str:
        """Return the part that a text stands for, in which special tokens are tokens."""

    def text_before(self, marker: str) -> str:
        """Return the part of any text up to a marker, and of the marker."""

    def json(self, schema: Any) -> str:
        """Return the part of a JSON value of the schema."""
