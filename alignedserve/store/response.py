"""A response as the store keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True)
class StoredResponse:
    """A response with the input that it answers. Instants are whole seconds since 1970."""

    id: str
    owner: str  # the id of the key that asked for it; other keys do not see it
    created_at: int
    expires_at: int
    input: list[dict[str, Any]]  # the items of its own turn
    answer: dict[str, Any]  # as clients see it
    previous: str | None = None  # the response that it continues
    job: str | None = None  # the job that makes it in the background

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items of its turn, as later turns of the conversation see them."""
        return [*self.input, *self.answer["output"]]

    def has_expired(self, now: float) -> bool:
        return self.expires_at <= now

    def to_text(self) -> str:
        return msgspec.json.encode(self).decode()  # an answer with log-probabilities may have megabytes

    @classmethod
    def from_text(cls, text: str) -> StoredResponse:
        return msgspec.json.decode(text, type=cls)
