"""Turn messages into frames and back: one msgpack array per message, checked on both sides.

    [version, sender, incarnation, number, kind, fields]

A message's dataclass is its schema: its fields in their order, nested dataclasses as arrays, enums by value. A frame
that does not fit the schema is refused with `WireError`; nothing is ever unpickled.

msgspec does both directions in C. It writes dataclasses as maps, so each dataclass has a *twin* here, a struct with the
same fields that msgspec writes as an array:

    message ── convert ──▶ twin ── encode ──▶ frame ── decode ──▶ twin ── convert, __post_init__ ──▶ message

A step's outputs are the most frequent frame, and `Tokens` with all that is in it are named tuples and structs: no twin,
no conversion, and nothing is checked before it is sent.

A process of the version before may be at the other end. So a dataclass may get new last fields that have defaults and
that the receiver may overlook: last fields that are missing have their defaults, and what follows the last field that
is known is skipped. Every other change raises VERSION, once per release; tests/released finds such changes.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Raw

from alignedserve.core import Entry, Request
from alignedserve.errors import WireError
from alignedserve.protocol import messages

VERSION = 8
MOST_NAMED = 32  # attempts: a note of more would charge many for one
MOST_FRAME_BYTES = 64 << 20  # a prompt of a million tokens takes a twelfth; what is larger is no frame of ours

_SCALARS = (int, float, str, bool, bytes)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(messages.Message)}
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)  # made for every frame, and a frozen one takes three times as long
class Envelope:
    sender: str
    incarnation: int  # of the sender
    number: int  # of the frame on its link, from 1
    message: messages.Message


class _Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    sender: str
    incarnation: int
    number: int
    kind: str
    values: Raw


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: str
    values: Raw


class _RequestHead(msgspec.Struct, array_like=True):
    """The first fields of a request; what follows is skipped."""

    id: str
    owner: str
    attempt: int


class _EntryHead(msgspec.Struct, array_like=True):
    request: _RequestHead


_Head = TypeVar("_Head")


class _First(msgspec.Struct, Generic[_Head], array_like=True):
    """The first field of a message; what follows is skipped."""

    field: _Head


_read_frame = msgspec.msgpack.Decoder(_Frame).decode
_read_record = msgspec.msgpack.Decoder(_Record).decode
_read_request = msgspec.msgpack.Decoder(_First[_RequestHead]).decode
_FEW = msgspec.Meta(max_length=MOST_NAMED)
_read_requests = msgspec.msgpack.Decoder(_First[Annotated[list[_RequestHead], _FEW]]).decode
_read_entry = msgspec.msgpack.Decoder(_First[_EntryHead]).decode
_read_entries = msgspec.msgpack.Decoder(_First[Annotated[list[_EntryHead], _FEW]]).decode


def encode(envelope: Envelope) -> bytes:
    """Return the frame that holds the envelope."""
    kind, twin = _twin_of(envelope.message)
    return _written(kind, (VERSION, envelope.sender, envelope.incarnation, envelope.number, kind, twin))


def decode(frame: bytes, most_bytes: int) -> Envelope:
    """Return the envelope that the frame holds, or raise WireError where it fits no schema."""
    if len(frame) > most_bytes:
        raise WireError(f"a frame of {len(frame)} bytes exceeds the limit of {most_bytes}")
    try:
        read = _read_frame(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        _check_version(frame)
        raise WireError(
            f"a frame is not [version, sender, incarnation, number, kind, fields]: {error!s:.100}"
        ) from error
    if read.version != VERSION:
        _check_version(frame)
    return Envelope(read.sender, read.incarnation, read.number, _message(read.kind, read.values, _KINDS))


def attempts_in(frame: bytes) -> tuple[messages.Attempt, ...]:
    """Return the attempts in a frame, where they are few. `decode` may fail at these so badly that the process ends:
    nothing but names is read here."""
    try:
        read = _read_frame(frame)
        heads = _heads_of(_KINDS[read.kind])(read.values) if read.kind in _KINDS else []
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):  # too many, or `decode` says what is wrong
        heads = []
    return tuple((head.id, head.attempt) for head in heads)


@cache
def _heads_of(kind: type) -> Callable[[Raw], list[_RequestHead]]:
    """Return what reads the first fields of the requests that messages of this kind begin with, if they do."""
    first = next(iter(typing.get_type_hints(kind).values()), None)
    if first is Request:
        return lambda values: [_read_request(values).field]
    if first == tuple[Request, ...]:
        return lambda values: _read_requests(values).field
    if first is Entry:
        return lambda values: [_read_entry(values).field.request]
    if first == tuple[Entry, ...]:
        return lambda values: [entry.request for entry in _read_entries(values).field]
    return lambda _values: []


def pack(value: Any) -> bytes:
    """Return a dataclass by itself as a frame: [kind, fields]."""
    kind, twin = _twin_of(value)
    return _written(kind, (kind, twin))


def unpack(frame: bytes, kinds: Mapping[str, type]) -> Any:
    """Return the dataclass of one of these kinds that `pack` made the frame of."""
    try:
        read = _read_record(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"a frame is not [kind, fields]: {error!s:.100}") from error
    return _message(read.kind, read.values, kinds)


def _twin_of(message: Any) -> tuple[str, Any]:
    kind: Any = type(message)
    twin, _ = _codec(kind)
    if twin is kind:
        return kind.__name__, message
    try:
        return kind.__name__, msgspec.convert(message, twin, from_attributes=True)
    except msgspec.ValidationError as error:
        raise WireError(f"a {kind.__name__} cannot be sent: {error!s:.100}") from error


def _written(kind: str, values: tuple[Any, ...]) -> bytes:
    try:
        return _encode(values)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:  # numbers beyond 64 bits, half a character
        raise WireError(f"a {kind} cannot be sent: {error!s:.100}") from error


def _message(name: str, values: Raw, kinds: Mapping[str, type]) -> Any:
    kind = kinds.get(name)
    if kind is None:
        raise WireError(f"a frame holds the unknown kind {name!r:.40}")
    twin, decoder = _codec(kind)
    try:
        read = decoder.decode(values)
        return read if twin is kind else msgspec.convert(read, kind, from_attributes=True)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"a frame holds no valid {name}: {error!s:.150}") from error


def _check_version(frame: bytes) -> None:
    """Raise WireError that names the frame's version where it has another one, whatever else is in the frame."""
    try:
        read = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError) as error:
        raise WireError(f"a frame is not msgpack: {error!s:.100}") from error
    version = read[0] if isinstance(read, list) and read else "none"
    if type(version) is not int or version != VERSION:
        sender = f" of {read[1]!r:.40}" if isinstance(read, list) and len(read) > 1 else ""
        do = "run one version of AlignedServe in a deployment"
        raise WireError(f"a frame{sender} has version {version!r:.40}, this process speaks {VERSION}: {do}")


@cache
def _codec(kind: type) -> tuple[Any, msgspec.msgpack.Decoder[Any]]:
    """Return the twin of a dataclass and what reads it."""
    twin = _twin(kind)
    return twin, msgspec.msgpack.Decoder(twin)


def _twin_field(field: Field[Any], twin: Any) -> tuple[Any, ...]:
    """Return the twin's field, with the default of the dataclass's field where there is one."""
    if field.default is MISSING:
        return field.name, twin
    made = partial(msgspec.convert, field.default, twin, from_attributes=True)
    return field.name, twin, msgspec.field(default_factory=made)


@cache
def _twin(hint: Any) -> Any:
    """Return the hint with a struct in the place of each dataclass."""
    if hint in _SCALARS or (isinstance(hint, type) and issubclass(hint, (Enum, tuple, msgspec.Struct))):
        return hint
    if is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint)
        twins = [_twin_field(field, _twin(hints[field.name])) for field in fields(hint)]
        return msgspec.defstruct(hint.__name__, twins, array_like=True, gc=False)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return types.GenericAlias(tuple, tuple(arg if arg is Ellipsis else _twin(arg) for arg in args))
    if origin is Sequence:  # of a command only
        return types.GenericAlias(tuple, (_twin(args[0]), ...))
    if origin in (typing.Union, types.UnionType) and len(args) == 2 and args[1] is type(None):
        return _twin(args[0]) | None
    raise TypeError(f"messages cannot hold {hint}")
