"""A response as the store keeps it. Only the standard library is imported here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


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
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> StoredResponse:
        return cls(**json.loads(text))
