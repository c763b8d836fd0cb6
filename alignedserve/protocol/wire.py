"""Messages as frames: one msgpack array each, typed and checked on both sides.

    [version, sender, incarnation, number, kind, fields]

A message's dataclass is its schema: its fields in their order, nested dataclasses as arrays,
enums by value. What does not fit the schema is refused with `WireError`; nothing is ever unpickled.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import msgpack

from alignedserve.errors import WireError
from alignedserve.protocol import messages

VERSION = 4
MOST_FRAME_BYTES = 64 << 20  # a prompt of a million tokens takes a twelfth; what is larger is no frame of ours

Pack = Callable[[Any], Any]
Unpack = Callable[[Any], Any]
_Head = tuple[str, int, int]  # sender, incarnation, number


@dataclass(slots=True)  # made for every frame, and a frozen one takes three times as long
class Envelope:
    sender: str
    incarnation: int  # of the sender
    number: int  # of the frame on its link, from 1
    message: messages.Message


def encode(envelope: Envelope) -> bytes:
    message = envelope.message
    kind: Any = type(message)
    head = (VERSION, envelope.sender, envelope.incarnation, envelope.number, kind.__name__)
    try:
        packed: bytes = msgpack.packb((*head, _codec(kind)[0](message)))
    except (OverflowError, UnicodeEncodeError) as error:  # numbers beyond 64 bits, half a character
        raise WireError(f"a {kind.__name__} cannot be sent: {error!s:.100}") from error
    return packed


def pack(value: Any) -> bytes:
    """A dataclass by itself: [kind, fields]."""
    kind: Any = type(value)
    packed: bytes = msgpack.packb((kind.__name__, _codec(kind)[0](value)))
    return packed


def unpack(frame: bytes, kinds: Mapping[str, type]) -> Any:
    """The way back, to one of these kinds."""
    match _read(frame):
        case (str(kind), tuple(values)) if kind in kinds:
            return _codec(kinds[kind])[1](values)
    raise WireError("a frame is not [kind, fields] of a known kind")


def decode(frame: bytes, most_bytes: int) -> Envelope:
    if len(frame) > most_bytes:
        raise WireError(f"a frame of {len(frame)} bytes exceeds the limit of {most_bytes}")
    read = _read(frame)
    version = read[0] if isinstance(read, tuple) and read else "none"
    if type(version) is not int or version != VERSION:
        raise WireError(f"a frame has version {version!r:.40}, this process speaks {VERSION}")
    match read:
        case (_, *head, str(kind), tuple(values)) if kind in _KINDS:
            sender, incarnation, number = _codec(_Head)[1](tuple(head))
            return Envelope(sender, incarnation, number, _codec(_KINDS[kind])[1](values))
    raise WireError("a frame is not [version, sender, incarnation, number, kind, fields] of a known kind")


def _read(frame: bytes) -> Any:
    try:
        return msgpack.unpackb(frame, use_list=False)
    except ValueError as error:
        raise WireError(f"a frame is no msgpack: {error!s:.100}") from error
    except Exception as error:  # msgpack's own exceptions share no base class with each other
        raise WireError(f"a frame is broken: {type(error).__name__}") from error


_KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(messages.Message)}
_SCALARS = (int, float, str, bool, bytes)


def _same(value: Any) -> Any:
    return value


@cache
def _codec(of: Any) -> tuple[Pack, Unpack]:
    """How a value of this type is packed and, checked, unpacked."""
    if of in _SCALARS:
        return _same, _scalar(of)
    if is_dataclass(of):
        return _dataclass(of)
    if isinstance(of, type) and issubclass(of, Enum):
        return lambda value: value.value, _checked(of, of.__name__)
    origin, args = typing.get_origin(of), typing.get_args(of)
    if origin is tuple:
        return _tuple(args)
    if origin is Sequence:  # of a command only: whoever reads it gets a tuple
        return _sequence(args[0])
    if origin in (typing.Union, types.UnionType) and len(args) == 2 and args[1] is type(None):
        return _optional(args[0])
    raise TypeError(f"messages cannot hold {of}")


def _scalar(of: type) -> Unpack:
    def unpack(value: Any) -> Any:
        if type(value) is of or (of is float and type(value) is int):
            return value
        raise WireError(f"a frame holds {type(value).__name__} where {of.__name__} belongs")

    return unpack


def _checked(make: Callable[[Any], Any], name: str) -> Unpack:
    def unpack(value: Any) -> Any:
        try:
            return make(value)
        except (ValueError, TypeError) as error:
            raise WireError(f"a frame holds no valid {name}: {error!s:.100}") from error

    return unpack


def _dataclass(of: Any) -> tuple[Pack, Unpack]:
    hints = typing.get_type_hints(of)
    names = [field.name for field in fields(of)]
    codecs = [_codec(hints[name]) for name in names]
    packs = [(name, pack) for name, (pack, _) in zip(names, codecs, strict=True)]
    unpacks = [unpack for _, unpack in codecs]

    def pack(value: Any) -> Any:
        return tuple([pack(getattr(value, name)) for name, pack in packs])

    def unpack(values: Any) -> Any:
        if type(values) is not tuple or len(values) != len(unpacks):
            raise WireError(f"a frame's {of.__name__} has other fields than this process knows")
        return make([unpack(value) for unpack, value in zip(unpacks, values, strict=True)])

    make = _checked(lambda values: of(*values), of.__name__)
    return pack, unpack


def _tuple(args: tuple[Any, ...]) -> tuple[Pack, Unpack]:
    if args[-1] is Ellipsis:
        return _sequence(args[0])
    codecs = [_codec(arg) for arg in args]

    def pack(values: Any) -> Any:
        return tuple([pack(value) for (pack, _), value in zip(codecs, values, strict=True)])

    def unpack(values: Any) -> Any:
        if type(values) is not tuple or len(values) != len(codecs):
            raise WireError(f"a frame lacks a tuple of {len(codecs)}")
        return tuple([unpack(value) for (_, unpack), value in zip(codecs, values, strict=True)])

    return pack, unpack


def _sequence(of: Any) -> tuple[Pack, Unpack]:
    pack_one, unpack_one = _codec(of)

    def unpack(values: Any) -> Any:
        if type(values) is not tuple:
            raise WireError(f"a frame holds {type(values).__name__} where a sequence belongs")
        if of is int and set(map(type, values)) <= {int}:  # token ids and pages: thousands of them
            return values
        return tuple([unpack_one(value) for value in values])

    return (_same if pack_one is _same else lambda values: tuple([pack_one(value) for value in values])), unpack


def _optional(of: Any) -> tuple[Pack, Unpack]:
    pack, unpack = _codec(of)
    return (
        lambda value: None if value is None else pack(value),
        lambda value: None if value is None else unpack(value),
    )
