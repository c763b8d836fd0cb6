"""Keep responses in the store of jobs, each for its owner and for a limited time, and find conversations in it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter

from alignedserve.config.sections import JobsConfig
from alignedserve.errors import StoreError
from alignedserve.gateway.openai.errors import ApiError, invalid
from alignedserve.gateway.openai.types import MOST_MESSAGES
from alignedserve.gateway.openai.writing import json_parts
from alignedserve.gateway.responses.background import Background
from alignedserve.gateway.responses.types import (
    InputItem,
    Item,
    ItemReference,
    MessageItem,
    ResponseRequest,
    response_of,
)
from alignedserve.store.response import StoredResponse
from alignedserve.store.storage import OpenStorage

_log = logging.getLogger("alignedserve.gateway")
_MB = 1_000_000
_ITEMS: TypeAdapter[Any] = TypeAdapter(list[InputItem])


class ResponseKeeper:
    """The responses that this deployment keeps; none, if it has no store."""

    def __init__(
        self, open_storage: OpenStorage | None, config: JobsConfig, runner_away_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`runner_away_s` returns for how long there has been no job runner."""
        self._open_storage, self._config, self.runner_away_s = open_storage, config, runner_away_s
        self.background = None if open_storage is None else Background(open_storage, config)

    @property
    def is_on(self) -> bool:
        return self._open_storage is not None

    async def make(
        self, owner: str, items: Sequence[msgspec.Raw], answer: dict[str, Any], job: str | None = None
    ) -> StoredResponse:
        """Return a response as it is kept, with the items of its own input."""
        written = bytearray()
        for part in json_parts(answer):
            written += part
            await asyncio.sleep(0)  # the event loop turns: an answer with log-probabilities may have megabytes
        now = int(time.time())
        expires_at, previous = now + self._config.keep_s, answer["previous_response_id"]
        return StoredResponse(answer["id"], owner, now, expires_at, [*items], msgspec.Raw(written), previous, job)

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

    async def own_items(self, owner: str, body: ResponseRequest, room: KeptItemRoom) -> list[Item]:
        """Return the items of a body's own input, with the items that its references stand for."""
        if isinstance(body.input, str):
            return [MessageItem(role="user", content=body.input)]
        by_response: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)  # each is read once
        for number, item in enumerate(body.input):
            if isinstance(item, ItemReference):
                by_response[response_of(item.id)].append((number, item.id))
        found: dict[str, msgspec.Raw] = {}
        for response, references in by_response.items():
            turn = await self._get(owner, response) if response else None
            kept = {} if turn is None else {kept_id(item): item for item in turn.items}
            for number, id in references:
                if id not in kept:
                    message = f"there is no item {id!r:.80}: its response was not stored, was deleted or has expired"
                    raise ApiError(404, message, param=f"input[{number}].id", code="item_not_found")
                found[id] = room.take(kept[id], "input")
        meant = dict(zip(found, await asyncio.to_thread(_read_items, [*found.values()]), strict=True))
        return [meant[item.id] if isinstance(item, ItemReference) else item for item in body.input]

    async def items_before(self, owner: str, body: ResponseRequest, room: KeptItemRoom) -> list[Item]:
        """Return the items of the conversation that a body continues, the oldest first."""
        turns: list[list[msgspec.Raw]] = []
        id, num_items = body.previous_response_id, 0
        while id is not None:
            turn = await self._get(owner, id)
            if turn is None:
                message = f"there is no response {id!r:.80}: it was not stored, was deleted or has expired"
                raise invalid(message, "previous_response_id", "previous_response_not_found")
            if turn.status in ("queued", "in_progress"):
                raise invalid(f"{id:.80} has not ended yet", "previous_response_id", "previous_response_not_ended")
            turns.append([room.take(item, "previous_response_id") for item in turn.items])
            id, num_items = turn.previous, num_items + len(turns[-1])
            if num_items > MOST_MESSAGES:
                message = f"the conversation has more than {MOST_MESSAGES} items"
                raise invalid(message, "previous_response_id", "context_length_exceeded")
        return await asyncio.to_thread(_read_items, [item for turn in reversed(turns) for item in turn])

    async def keep(self, owner: str, items: Sequence[msgspec.Raw], answer: dict[str, Any]) -> bool:
        """Keep a response; return whether it is kept, which a store that cannot be reached does not do."""
        if self._open_storage is None:
            return False
        try:
            await self.add(await self.make(owner, items, answer))
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


class KeptItemRoom:
    """The room that what a body brings in from kept responses has in memory: as much as a body itself may take."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = self._left = most_bytes

    def take(self, item: msgspec.Raw, param: str) -> msgspec.Raw:
        """Return the item, without the record that it is a part of; raise if there is no room for it."""
        self._left -= len(memoryview(item))
        if self._left < 0:
            message = f"the kept items that it brings in have more than {self._most_bytes} bytes, the limit of a body"
            raise invalid(f"{param}: {message}: refer to fewer or shorter ones", param, "too_large")
        return item.copy()


class _KeptItemId(msgspec.Struct):
    id: str


_ITEM_ID = msgspec.json.Decoder(_KeptItemId)


def kept_id(item: msgspec.Raw) -> str:
    """Return the id of a kept item, and decode nothing else."""
    return _ITEM_ID.decode(item).id


def _read_items(kept: Sequence[msgspec.Raw]) -> list[Item]:
    """Return items as they were kept."""
    items: list[Item] = _ITEMS.validate_python([msgspec.json.decode(item) for item in kept])
    return items
