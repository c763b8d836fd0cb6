"""Examples of all messages, and the types that travel. Only alignedserve is imported, so any version's code can run it.

python tests/released/wire.py < frames       reads frames, a line of hex each, and prints each message's fields
"""

from __future__ import annotations

import itertools
import json
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from typing import Any

import msgspec

from alignedserve.core import Sampling
from alignedserve.errors import WireError
from alignedserve.protocol import messages
from alignedserve.protocol.wire import MOST_FRAME_BYTES, VERSION, Envelope, decode, encode

KINDS: list[type] = list(typing.get_args(messages.Message))


@dataclass(frozen=True)
class Wire:
    """What a version writes to the wire, and what it may read."""

    version: int
    skips_fields: bool  # whether a message may have more last fields than this version knows
    types: dict[str, list[str]]  # the fields of every type that travels, or the values of an enum
    frames: dict[str, str]  # a frame of each kind of message, in hex
    fields: dict[str, Any]  # the message of each frame

    @classmethod
    def of_this_code(cls) -> Wire:
        envelopes = {kind.__name__: Envelope("sender", 2, 3, example(kind)) for kind in KINDS}
        return cls(
            VERSION,
            _skips_fields(),
            described(KINDS),
            {name: encode(envelope).hex() for name, envelope in envelopes.items()},
            {name: plain(envelope.message) for name, envelope in envelopes.items()},
        )


def plain(message: object) -> Any:
    """Return what a message says, with the names of its fields, as JSON has it."""
    return msgspec.json.decode(msgspec.json.encode(message))


def read(frame: str) -> Any:
    """Return what the message in a frame says, or why the frame is refused."""
    try:
        return plain(decode(bytes.fromhex(frame), MOST_FRAME_BYTES).message)
    except WireError as error:
        return str(error)


def _skips_fields() -> bool:
    head = ("sender", 2, 3, "Missed")
    return isinstance(read(msgspec.msgpack.encode((VERSION, *head, ["a later field"])).hex()), dict)


def example(hint: Any, numbers: Iterator[int] | None = None) -> Any:
    """Return a value of the type, in which every field says something else."""
    numbers = numbers or itertools.count(1)
    number = next(numbers)
    simple = {int: number, float: number / 1024, str: f"text {number}", bool: True, bytes: bytes([number % 256])}
    if hint in simple:
        return simple[hint]
    if is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, (tuple, msgspec.Struct))):
        values = {name: example(inner, numbers) for name, inner in typing.get_type_hints(hint).items()}
        return hint(**values | ({"syntax": ""} if hint is Sampling else {}))  # it has a grammar, or a syntax
    if isinstance(hint, type) and issubclass(hint, Enum):
        return list(hint)[-1]
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return tuple(example(arg, numbers) for arg in (args[:1] * 2 if args[-1] is Ellipsis else args))
    return example(args[0], numbers)  # it may be None, too


def described(kinds: Sequence[type]) -> dict[str, list[str]]:
    """Return the fields of these types and of all types in them, and the values of enums."""
    found = [*kinds]
    for kind in found:  # the list grows on the way
        hints = {} if issubclass(kind, Enum) else typing.get_type_hints(kind)
        inside = [inner for hint in hints.values() for inner in _types_in(hint)]
        found += [inner for inner in dict.fromkeys(inside) if inner not in found]
    return {kind.__name__: _fields_of(kind) for kind in found}


def is_enum(fields: list[str]) -> bool:
    return not all(": " in field for field in fields)


def _fields_of(kind: type) -> list[str]:
    if issubclass(kind, Enum):
        return [str(member.value) for member in kind]
    return [f"{name}: {_shown(hint)}" for name, hint in typing.get_type_hints(kind).items()]


def _types_in(hint: Any) -> list[type]:
    if args := typing.get_args(hint):
        return [inner for arg in args for inner in _types_in(arg)]
    is_ours = is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, (Enum, tuple, msgspec.Struct)))
    return [hint] if is_ours and isinstance(hint, type) else []


def _shown(hint: Any) -> str:
    """Return a type as it would be written out, with aliases resolved."""
    args = [_shown(arg) for arg in typing.get_args(hint)]
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(args)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(args)}]"
    return {Ellipsis: "...", type(None): "None"}.get(hint) or str(hint.__name__)


if __name__ == "__main__":
    reads = sys.argv[1:] == ["read"]
    print(json.dumps([*map(read, sys.stdin.read().split())] if reads else asdict(Wire.of_this_code())))
