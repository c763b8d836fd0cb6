"""Keep responses in the store of jobs, each for its owner and for a limited time, and find conversations in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from alignedserve.config.config import JobsConfig
from alignedserve.errors import StoreError
from alignedserve.gateway.openai.errors import ApiError, invalid
from alignedserve.gateway.openai.types import MOST_MESSAGES
from alignedserve.gateway.responses.background import Background
from alignedserve.gateway.responses.items import InputItem, Item, ItemReference, MessageItem, place_of
from alignedserve.gateway.responses.types import ResponseRequest
from alignedserve.store.response import StoredResponse
from alignedserve.store.storage import OpenStorage

_log = logging.getLogger("alignedserve.gateway")
_MB = 1_000_000
_ITEMS: TypeAdapter[Any] = TypeAdapter(list[InputItem])


class ResponseKeeper:
    """The responses that this deployment keeps; none, if it has no store."""

    def __init__(
        self,
        open_storage: OpenStorage | None,
        config: JobsConfig,
        runner_away_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`runner_away_s` returns for how long there has been no job runner."""
        self._open_storage, self._config, self.runner_away_s = open_storage, config, runner_away_s
        self.background = None if open_storage is None else Background(open_storage, config)

    @property
    def is_on(self) -> bool:
        return self._open_storage is not None

    def make(
        self, owner: str, items: Sequence[dict[str, Any]], answer: dict[str, Any], job: str | None = None
    ) -> StoredResponse:
        """Return a response as it is kept, with the items of its own input."""
        now = int(time.time())
        expires_at = now + self._config.keep_s
        return StoredResponse(
            answer["id"], owner, now, expires_at, [*items], answer, answer["previous_response_id"], job
        )

    async def add(self, response: StoredResponse) -> None:
        assert self._open_storage is not None
        await (await self._open_storage()).store.add_response(response, self._config.quota_mb * _MB)

    async def find(self, owner: str, id: str) -> StoredResponse:
        found = await self._get(owner, id)
        if found is None:
            raise ApiError(404, f"there is no response {id!r:.80}", param="id", code="response_not_found")
        return found

    async def remove(self, response: StoredResponse) -> None:
        assert self._open_storage is not None
        await (await self._open_storage()).store.remove_response(response.owner, response.id)

    async def own_items(self, owner: str, body: ResponseRequest) -> list[Item]:
        """Return the items of a body's own input, with the items that its references stand for."""
        if isinstance(body.input, str):
            return [MessageItem(role="user", content=body.input)]
        items: list[Item] = []
        for number, item in enumerate(body.input):
            items.append(await self._resolve(owner, item, number) if isinstance(item, ItemReference) else item)
        return items

    async def items_before(self, owner: str, body: ResponseRequest) -> list[Item]:
        """Return the items of the conversation that a body continues, the oldest first."""
        turns: list[StoredResponse] = []
        id, num_items = body.previous_response_id, 0
        while id is not None:
            turn = await self._get(owner, id)
            if turn is None:
                message = f"there is no response {id!r:.80}: it was not stored, was deleted or has expired"
                raise invalid(message, "previous_response_id", "previous_response_not_found")
            if turn.answer["status"] in ("queued", "in_progress"):
                raise invalid(f"{id:.80} has not ended yet", "previous_response_id", "previous_response_not_ended")
            turns.append(turn)
            id, num_items = turn.previous, num_items + len(turn.items)
            if num_items > MOST_MESSAGES:
                message = f"the conversation has more than {MOST_MESSAGES} items"
                raise invalid(message, "previous_response_id", "context_length_exceeded")
        return read_items([item for turn in reversed(turns) for item in turn.items])

    async def keep(self, response: StoredResponse) -> bool:
        """Keep a response; return whether it is kept, which a store that cannot be reached does not do."""
        if self._open_storage is None:
            return False
        try:
            await self.add(response)
        except StoreError as error:
            _log.error("responses are not kept: %s", error)
            return False
        return True

    async def _get(self, owner: str, id: str) -> StoredResponse | None:
        """Return a response as it is now."""
        if self._open_storage is None or self.background is None:
            return None
        found = await (await self._open_storage()).store.response(owner, id)
        if found is None or found.has_expired(time.time()):
            return None
        return await self.background.refresh(found)

    async def _resolve(self, owner: str, reference: ItemReference, number: int) -> Item:
        place = place_of(reference.id)
        turn = None if place is None else await self._get(owner, place[0])
        if place is not None and turn is not None:
            items = turn.answer["output"] if place[1] else turn.input
            if place[2] < len(items):
                return read_items([items[place[2]]])[0]
        message = f"there is no item {reference.id!r:.80}: its response was not stored, was deleted or has expired"
        raise ApiError(404, message, param=f"input[{number}].id", code="item_not_found")


def read_items(trees: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Return items as they were kept."""
    items: list[Item] = _ITEMS.validate_python(list(trees))
    return items
