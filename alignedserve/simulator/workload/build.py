"""A `Mixture` from a tree of plain values.

What a key is called, takes and defaults to stands in the dataclass that its value ends up in. A stream has the keys of
its kind (where its lengths come from), of its arrivals, and of what all streams have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from alignedserve.config.setting import Setting, setting, settings_of
from alignedserve.config.sources import hint, read_value
from alignedserve.errors import ConfigError, WorkloadError
from alignedserve.simulator.workload.amounts import Amount
from alignedserve.simulator.workload.files import read_lengths, read_trace
from alignedserve.simulator.workload.lengths import DrawnSizes, LengthSource, RecordedLengths, Sampled, ShortLong
from alignedserve.simulator.workload.load import Mixture
from alignedserve.simulator.workload.pace import (
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
from alignedserve.simulator.workload.stream import ClientLimits, Span, Stream, StreamPromise, Turns

Tree = dict[str, Any]
Part = TypeVar("Part")

USUAL_REQUESTS = 1000  # of a stream that is told neither how many nor how long


@dataclass(frozen=True)
class TraceFile:
    path: str = setting("", "CSV file with arrival_s, prompt_tokens and output_tokens")


@dataclass(frozen=True)
class LengthsFile:
    path: str = setting("", "CSV file with prompt_tokens and output_tokens, to draw from")


@dataclass(frozen=True)
class Named:
    name: str = setting(Stream.name, "what a stream is called")


@dataclass(frozen=True)
class Whole:
    """Of all streams together."""

    first_s: float | None = setting(None, "no stream has arrivals later than that, in seconds", least=0)
    rate: float | None = setting(
        None, "arrivals in a second, of all streams that have a rate together", least=LEAST_RATE, most=MOST_RATE
    )
    rate_scale: float | None = setting(None, "times the rate of all streams that have one", above=0)


KINDS: Mapping[str, type] = {"trace": TraceFile, "lengths": LengthsFile, "mix": ShortLong, "sizes": DrawnSizes}
ARRIVALS: Mapping[str, type[ArrivalProcess]] = {
    "gamma": Gamma,
    "bursts": Bursts,
    "diurnal": Diurnal,
    "closed": ClosedArrivals,
    "at_once": AtOnce,
}
_NEEDS = {"think_s": "turns", "patience_s": "leaving_share"}  # a key that means nothing without another


def keys_of(*parts: type) -> dict[str, Setting]:
    return {one.path: one for part in parts for one in settings_of(part)}


WHOLE_KEYS = tuple(keys_of(Whole))


def build(tree: Tree, source: str, folder: Path) -> Mixture:
    """`folder` is where paths in it begin."""
    try:
        whole = _whole({key: value for key, value in tree.items() if key != "streams"})
        mixture = Mixture(tuple(_stream(one, folder, whole) for one in _streams(tree.get("streams"))))
        return _at_rate(mixture, whole)
    except (ConfigError, WorkloadError) as error:
        raise WorkloadError(f"{source}: {error}") from None


def _whole(tree: Tree) -> Whole:
    whole = _part(Whole, _values(tree, keys_of(Whole), "a workload, beside streams"))
    if whole.rate is not None and whole.rate_scale is not None:
        raise WorkloadError("rate and rate_scale exclude each other")
    return whole


def _at_rate(mixture: Mixture, whole: Whole) -> Mixture:
    if whole.rate is not None:
        return mixture.at_rate(whole.rate)
    return mixture if whole.rate_scale is None else mixture.at_rate(whole.rate_scale * mixture.rate)


def _streams(streams: Any) -> list[Tree]:
    """Each with a name; the only one may do without."""
    if not isinstance(streams, list) or not streams:
        raise WorkloadError("streams must be a list of at least one stream")
    for number, stream in enumerate(streams, 1):
        if not isinstance(stream, dict):
            raise WorkloadError(f"stream {number} must be keys and values, such as rate: 5.5")
        if "name" in stream:
            read_value(keys_of(Named)["name"], stream["name"], f"stream {number}: name")
        elif len(streams) > 1:
            raise WorkloadError(f"stream {number} must have a name: it is seeded by that")
    return streams


def _stream(tree: Tree, folder: Path, whole: Whole) -> Stream:
    name = tree.get("name", Stream.name)
    try:
        kind: type = _form(tree, "kind", KINDS, "sizes")
        return _trace(name, tree, folder, whole) if kind is TraceFile else _drawn(name, kind, tree, folder, whole)
    except (ConfigError, WorkloadError) as error:
        raise WorkloadError(f"stream {tree.get('name', 1)}: {error}") from None


def _trace(name: str, tree: Tree, folder: Path, whole: Whole) -> Stream:
    values = _stream_values(tree, ("name", "kind"), (TraceFile, StreamPromise, ClientLimits, Span), "a trace")
    read = read_trace(_path(TraceFile, values, folder))
    parts = _part(StreamPromise, values), Turns(), _part(ClientLimits, values), _span(values, whole)
    return Stream(name, Recorded(read.times), RecordedLengths(read.pairs), *parts, read.notes)


def _drawn(name: str, kind: type, tree: Tree, folder: Path, whole: Whole) -> Stream:
    form = _form(tree, "arrivals", ARRIVALS, "gamma")
    what = f"{tree.get('kind', 'sizes')} with arrivals {tree.get('arrivals', 'gamma')}"
    values = _stream_values(
        tree, ("name", "kind", "arrivals"), (kind, form, StreamPromise, Turns, ClientLimits, Span), what
    )
    (lengths, notes), span = _lengths(kind, values, folder), _usual(_span(values, whole))
    parts = _part(StreamPromise, values), _part(Turns, values), _part(ClientLimits, values)
    return Stream(name, _part(form, values), lengths, *parts, span, notes)


def _lengths(kind: type, values: Tree, folder: Path) -> tuple[LengthSource, tuple[str, ...]]:
    """With what the reader of the figures should know."""
    if kind is LengthsFile:
        read = read_lengths(_path(kind, values, folder))
        return Sampled(read.pairs), read.notes
    lengths: LengthSource = _part(kind, values)
    return lengths, ()


def _path(kind: type, values: Tree, folder: Path) -> Path:
    if "path" not in values:
        raise WorkloadError(f"path is missing: {keys_of(kind)['path'].help}")
    return folder / str(values["path"])


def _span(values: Tree, whole: Whole) -> Span:
    span = _part(Span, values)
    limits = [limit for limit in (span.first_s, whole.first_s) if limit is not None]
    return Span(span.num_requests, min(limits, default=None))


def _usual(span: Span) -> Span:
    return Span(USUAL_REQUESTS) if span == Span() else span


# --- Keys and values


def _form(tree: Tree, key: str, forms: Mapping[str, type[Part]], usual: str) -> type[Part]:
    name = str(tree.get(key, usual))
    if name not in forms:
        raise WorkloadError(f"{key} must be one of {', '.join(forms)}, not {name!r}{hint(name, forms)}")
    return forms[name]


def _stream_values(tree: Tree, read: tuple[str, ...], parts: tuple[type, ...], what: str) -> Tree:
    """All but those that were read already."""
    values = _values({key: value for key, value in tree.items() if key not in read}, keys_of(*parts), what)
    for key, needed in _NEEDS.items():
        if key in values and needed not in values:
            raise WorkloadError(f"{key} means nothing without {needed}")
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


def _part(part: type[Part], values: Tree) -> Part:
    return part(**{key: value for key, value in values.items() if key in keys_of(part)})
