"""Builds a `Mixture` from a tree of plain values.

The name, type and default of a key stand in the dataclass that takes its value. A stream has the keys of its kind (the
source of its lengths), the keys of its arrivals, and the keys that all streams have.
"""

# ruff: noqa: RUF009  (what it takes for shared defaults are frozen, or fields made by `setting`)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from alignedserve.config.setting import Setting, setting, settings_of
from alignedserve.config.sources import hint, read_value
from alignedserve.errors import ConfigError, WorkloadError
from alignedserve.lab.loads.workload.amounts import (
    CHAT_OUTPUT,
    FORMS,
    Amount,
    DrawnSizes,
    LengthSource,
    RecordedLengths,
    Sampled,
    Scaled,
    ShortLong,
)
from alignedserve.lab.loads.workload.block_trace import SUFFIX, read_block_trace
from alignedserve.lab.loads.workload.files import ChatLengths, FileRequests, read_chats, read_lengths, read_trace
from alignedserve.lab.loads.workload.load import Mixture
from alignedserve.lab.loads.workload.pace import (
    LEAST_RATE,
    MOST_RATE,
    ArrivalProcess,
    AtOnce,
    Bursts,
    ClosedArrivals,
    Diurnal,
    Gamma,
    Recorded,
)
from alignedserve.lab.loads.workload.stream import ClientLimits, Foresight, Span, Stream, StreamPromise, Turns
from alignedserve.lab.loads.workload.windows import check_window

Tree = dict[str, Any]
Part = TypeVar("Part")

USUAL_REQUESTS = 1000  # of a stream for which neither their number nor a time is given


@dataclass(frozen=True)
class TraceFile:
    path: str = setting("", "CSV file with arrival_s, prompt_tokens and output_tokens, or Mooncake's JSON lines")


@dataclass(frozen=True)
class Windows:
    window_s: float | None = setting(
        None, "the seed draws windows of this length, in seconds; without it each seed has the trace as it is", above=0
    )


@dataclass(frozen=True)
class LengthsFile:
    path: str = setting("", "CSV file with prompt_tokens and output_tokens, to draw from")


@dataclass(frozen=True)
class ChatsFile:
    path: str = setting("", "file with a chat in each line, a JSON object with `messages`")
    output: Amount = setting(CHAT_OUTPUT, f"tokens of an answer where none is asked for, {FORMS}")


@dataclass(frozen=True)
class Named:
    name: str = setting(Stream.name, "name of the stream")


@dataclass(frozen=True)
class Whole:
    """The keys of the whole workload, beside its streams."""

    first_s: float | None = setting(None, "seconds after the start; no stream has later arrivals", least=0)
    rate: float | None = setting(
        None, "arrivals in a second, as the sum over all streams that have a rate", least=LEAST_RATE, most=MOST_RATE
    )
    rate_scale: float | None = setting(None, "factor for the rates of all streams that have a rate", above=0)
    length_scale: float = setting(
        1.0, "factor for the lengths that are drawn: small machines run large loads so", above=0, most=100
    )


KINDS: Mapping[str, type] = {
    "trace": TraceFile,
    "lengths": LengthsFile,
    "mix": ShortLong,
    "sizes": DrawnSizes,
    "chats": ChatsFile,
}
ARRIVALS: Mapping[str, type[ArrivalProcess]] = {
    "gamma": Gamma,
    "bursts": Bursts,
    "diurnal": Diurnal,
    "closed": ClosedArrivals,
    "at_once": AtOnce,
}
_OF_ALL = (StreamPromise, ClientLimits, Foresight, Span)  # keys that streams of every kind have
_NEEDS = {"think_s": "turns", "patience_s": "leaving_share"}  # a key -> another key, without which it has no meaning


def keys_of(*parts: type) -> dict[str, Setting]:
    return {key.path: key for part in parts for key in settings_of(part)}


WHOLE_KEYS = tuple(keys_of(Whole))


def build(tree: Tree, source: str, folder: Path) -> Mixture:
    """Build the mixture; relative paths in the tree start at `folder`."""
    try:
        whole = _build_whole({key: value for key, value in tree.items() if key != "streams"})
        streams = _checked_streams(tree.get("streams"))
        return _at_rate(Mixture(tuple(_build_stream(stream, folder, whole) for stream in streams)), whole)
    except (ConfigError, WorkloadError) as error:
        raise WorkloadError(f"{source}: {error}") from None


def _build_whole(tree: Tree) -> Whole:
    whole = _build_part(Whole, _values(tree, keys_of(Whole), "a workload, beside streams"))
    if whole.rate is not None and whole.rate_scale is not None:
        raise WorkloadError("rate and rate_scale exclude each other")
    return whole


def _at_rate(mixture: Mixture, whole: Whole) -> Mixture:
    if whole.rate is not None:
        return mixture.at_rate(whole.rate)
    return mixture if whole.rate_scale is None else mixture.at_rate(whole.rate_scale * mixture.rate)


def _checked_streams(streams: Any) -> list[Tree]:
    """Check the streams and return them. Each has a name, but a single stream need not have one."""
    if not isinstance(streams, list) or not streams:
        raise WorkloadError("streams must be a list of at least one stream")
    for number, stream in enumerate(streams, 1):
        if not isinstance(stream, dict):
            raise WorkloadError(f"stream {number} must be keys and values, such as rate: 5.5")
        if "name" in stream:
            read_value(keys_of(Named)["name"], stream["name"], f"stream {number}: name")
        elif len(streams) > 1:
            raise WorkloadError(f"stream {number} must have a name: the name is part of its seed")
    return streams


def _build_stream(tree: Tree, folder: Path, whole: Whole) -> Stream:
    name = tree.get("name", Stream.name)
    try:
        kind: type = _form(tree, "kind", KINDS, "sizes")
        if kind is TraceFile:
            return _build_trace(name, tree, folder, whole)
        return _build_drawn(name, kind, tree, folder, whole)
    except (ConfigError, WorkloadError) as error:
        raise WorkloadError(f"stream {tree.get('name', 1)}: {error}") from None


def _build_trace(name: str, tree: Tree, folder: Path, whole: Whole) -> Stream:
    if whole.length_scale != 1:
        raise WorkloadError("length_scale has no effect on a trace, which is asked as it is")
    values = _stream_values(tree, ("name", "kind"), (TraceFile, Windows, *_OF_ALL), "a trace")
    path = _path(TraceFile, values, folder)
    return _trace_stream(name, read_block_trace(path) if path.suffix == SUFFIX else read_trace(path), values, whole)


def trace_stream(name: str, read: FileRequests, tree: Tree) -> Stream:
    """Return the stream of requests that were read, with the keys of a trace."""
    try:
        return _trace_stream(name, read, _stream_values(tree, (), (Windows, *_OF_ALL), "a trace"), Whole())
    except ConfigError as error:
        raise WorkloadError(str(error)) from None


def _trace_stream(name: str, read: FileRequests, values: Tree, whole: Whole) -> Stream:
    window_s = _build_part(Windows, values).window_s
    check_window(read.times, window_s)
    parts = _build_part(StreamPromise, values), Turns(), _build_part(ClientLimits, values), _build_span(values, whole)
    lengths, foresight = RecordedLengths(read.pairs), _build_part(Foresight, values)
    return Stream(name, Recorded(read.times), lengths, *parts, read.notes, foresight, read.blocks, window_s)


def _build_drawn(name: str, kind: type, tree: Tree, folder: Path, whole: Whole) -> Stream:
    form = _form(tree, "arrivals", ARRIVALS, "gamma")
    what = f"{tree.get('kind', 'sizes')} with arrivals {tree.get('arrivals', 'gamma')}"
    values = _stream_values(tree, ("name", "kind", "arrivals"), (kind, form, Turns, *_OF_ALL), what)
    (lengths, notes), span = _build_lengths(kind, values, folder), _with_usual_number(_build_span(values, whole))
    if whole.length_scale != 1:
        lengths = _scaled(lengths, whole.length_scale)
    parts = _build_part(StreamPromise, values), _build_part(Turns, values), _build_part(ClientLimits, values)
    return Stream(name, _build_part(form, values), lengths, *parts, span, notes, _build_part(Foresight, values))


def _build_lengths(kind: type, values: Tree, folder: Path) -> tuple[LengthSource, tuple[str, ...]]:
    """Return the source of lengths, and notes for the reader of the figures."""
    if kind is LengthsFile:
        path = _path(kind, values, folder)
        read = read_block_trace(path) if path.suffix == SUFFIX else read_lengths(path)
        return Sampled(read.pairs), read.notes
    if kind is ChatsFile:
        return ChatLengths(read_chats(_path(kind, values, folder)), _build_part(ChatsFile, values).output), ()
    lengths: LengthSource = _build_part(kind, values)
    return lengths, ()


def _scaled(lengths: LengthSource, factor: float) -> LengthSource:
    if isinstance(lengths, ChatLengths):
        raise WorkloadError("length_scale has no effect on chats of a file, which are asked as they are")
    return Scaled(lengths, factor)


def _path(kind: type, values: Tree, folder: Path) -> Path:
    if "path" not in values:
        raise WorkloadError(f"path is missing: {keys_of(kind)['path'].help}")
    return folder / str(values["path"])


def _build_span(values: Tree, whole: Whole) -> Span:
    span = _build_part(Span, values)
    limits = [limit for limit in (span.first_s, whole.first_s) if limit is not None]
    return Span(span.num_requests, min(limits, default=None))


def _with_usual_number(span: Span) -> Span:
    return Span(USUAL_REQUESTS) if span == Span() else span


# --- Keys and values


def _form(tree: Tree, key: str, forms: Mapping[str, type[Part]], usual: str) -> type[Part]:
    name = str(tree.get(key, usual))
    if name not in forms:
        raise WorkloadError(f"{key} must be one of {', '.join(forms)}, not {name!r}{hint(name, forms)}")
    return forms[name]


def _stream_values(tree: Tree, read: tuple[str, ...], parts: tuple[type, ...], what: str) -> Tree:
    """Return the values of the keys that have not been read yet."""
    values = _values({key: value for key, value in tree.items() if key not in read}, keys_of(*parts), what)
    for key, needed in _NEEDS.items():
        if key in values and needed not in values and not (needed == "turns" and ChatsFile in parts):
            raise WorkloadError(f"{key} has no effect without {needed}")
    return values


def _values(tree: Tree, keys: Mapping[str, Setting], what: str) -> Tree:
    for key in map(str, tree):
        if key not in keys:
            raise WorkloadError(f"{key} is not a key of {what}, which are {', '.join(keys)}{hint(key, keys)}")
    return {key: _value(keys[key], value) for key, value in tree.items()}


def _value(key: Setting, value: Any) -> Any:
    if issubclass(key.kind, Amount) and type(value) in (int, float):
        value = str(value)
    return read_value(key, value, key.path)


def _build_part(part: type[Part], values: Tree) -> Part:
    keys = keys_of(part)
    return part(**{key: value for key, value in values.items() if key in keys})
