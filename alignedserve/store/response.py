"""A response as the store keeps it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec


@dataclass(frozen=True)
class StoredResponse:
    """A response with the input that it answers. Instants are whole seconds since 1970.

    What may have megabytes stays JSON as written: to decode an answer with log-probabilities takes seconds, in which
    nothing else runs, and six times the memory."""

    id: str
    owner: str  # the id of the key that asked for it; other keys do not see it
    created_at: int
    expires_at: int
    input: list[msgspec.Raw]  # the items of its own turn
    answer: msgspec.Raw  # as clients see it
    previous: str | None = None  # the response that it continues
    job: str | None = None  # the job that makes it in the background

    @property
    def status(self) -> str:
        return msgspec.json.decode(self.answer, type=_Status).status

    @property
    def output(self) -> list[msgspec.Raw]:
        """The items of the answer as models see them: without log-probabilities."""
        items = msgspec.json.decode(self.answer, type=_AnswerOutput).output
        return [msgspec.Raw(msgspec.json.encode(_without_logprobs(item))) for item in items]

    @property
    def items(self) -> list[msgspec.Raw]:
        """The items of its turn, as later turns of the conversation see them."""
        return [*self.input, *self.output]

    def with_answer(self, fields: dict[str, Any]) -> StoredResponse:
        """Return the response with these fields of its answer changed."""
        answer = msgspec.json.decode(self.answer, type=dict[str, msgspec.Raw]) | fields
        return replace(self, answer=msgspec.Raw(msgspec.json.encode(answer)))

    def has_expired(self, now: float) -> bool:
        return self.expires_at <= now


class _Status(msgspec.Struct):
    status: str


class _AnswerOutput(msgspec.Struct):
    output: list[dict[str, msgspec.Raw]]


def _without_logprobs(item: dict[str, msgspec.Raw]) -> dict[str, Any]:
    if "content" not in item:
        return item
    parts = msgspec.json.decode(item["content"], type=list[dict[str, msgspec.Raw]])
    return {**item, "content": [{name: part[name] for name in part if name != "logprobs"} for part in parts]}
