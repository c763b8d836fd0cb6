"""Reads files of chats: in each line a JSON object with `messages`, as OpenAI's chat API takes them.

    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}, ...]}

A turn is what is said until the assistant speaks. What an assistant says in the file is left out: the server that is
asked says it. A load test sends the texts; a simulation counts four letters as a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from alignedserve.errors import WorkloadError
from alignedserve.loads.workload.amounts import Amount
from alignedserve.loads.workload.files import json_lines
from alignedserve.loads.workload.lengths import Pair

_LETTERS = 4  # of a token, in English


@dataclass(frozen=True)
class Message:
    role: str
    content: str


Turn = tuple[Message, ...]


@dataclass(frozen=True)
class Chat:
    turns: tuple[Turn, ...]  # what is said before each answer


@dataclass(frozen=True)
class ChatLengths:
    """The lengths of chats; those of their answers are drawn."""

    chats: tuple[Chat, ...] = field(repr=False)
    output: Amount

    def chat(self, number: int) -> Chat:
        """Return the chat of the visit of this number; after the last chat the first comes again."""
        return self.chats[number % len(self.chats)]

    def of_one_turn(self) -> ChatLengths:
        return replace(self, chats=tuple(Chat(chat.turns[:1]) for chat in self.chats))

    def pair(self, number: int, draw: Random, turn: int = 0) -> Pair:
        letters = sum(len(message.content) for message in self.chat(number).turns[turn])
        return max(1, letters // _LETTERS), self.output.count(draw)


def read_chats(path: Path) -> tuple[Chat, ...]:
    chats = tuple(_chat(row, where) for where, row in json_lines(path))
    if not chats:
        raise WorkloadError(f"{path} has no chats")
    return chats


def _chat(row: Any, where: str) -> Chat:
    found = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(found, list):
        raise WorkloadError(f"{where} has no messages, such as {{'messages': [{{'role': 'user', 'content': '...'}}]}}")
    turns, said = list[Turn](), list[Message]()
    for message in (_message(one, where) for one in found):
        if message.role != "assistant":
            said.append(message)
        elif said:
            turns.append(tuple(said))
            said = []
    turns += [tuple(said)] if said else []
    if not turns:
        raise WorkloadError(f"{where}: nobody asks anything in this chat")
    return Chat(tuple(turns))


def _message(found: Any, where: str) -> Message:
    role, content = (found.get("role"), found.get("content")) if isinstance(found, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise WorkloadError(f"{where}: a message must have a role and a text as its content, not {found!r:.60}")
    return Message(role, content)
