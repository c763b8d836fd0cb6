"""Runs as files, and the first difference of two of them.

A file is JSON lines, gzipped where its name ends in .gz: the scenario, then each command of each core as
[time, sender, receiver, kind, fields], then how it ended. Neither writing nor comparing holds a run in memory.
"""

from __future__ import annotations

import gzip
import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from io import TextIOWrapper
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import IO, Any, Literal, cast

import msgpack

from alignedserve import messages
from alignedserve.errors import FuzzError
from alignedserve.messages import Command, Member
from alignedserve.simulator.clock import Agenda
from alignedserve.simulator.scenario import Scenario, from_tree, to_tree
from alignedserve.simulator.world import Witness

FORMAT = 1
_CONTEXT = 5  # commands before a difference that are shown
_WIDTH = 160


class Recorder(Witness):
    def __init__(self, file: IO[str], scenario: Scenario, agenda: Agenda) -> None:
        self._file, self._agenda = file, agenda
        self._write({"format": FORMAT, "scenario": to_tree(scenario)})

    def commanded(self, by: Member, command: Command, frame: bytes) -> None:
        _, road, _, _, kind, values = msgpack.unpackb(frame)
        self._write([self._agenda.now(), *road.split(">"), kind, values])

    def ended(self, how: str, digest: str) -> None:
        self._write({"ended": how, "digest": digest})

    def _write(self, line: object) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


@contextmanager
def open_run(path: Path, mode: Literal["r", "w"]) -> Iterator[IO[str]]:
    """The same bytes for the same run: gzip's time stamp is left out."""
    try:
        raw = path.open(f"{mode}b")
    except OSError as error:
        raise FuzzError(f"{path} cannot be opened: {error.strerror}") from error
    zipped = path.suffix == ".gz"
    opened = gzip.GzipFile(filename="", mode=f"{mode}b", fileobj=raw, mtime=0) if zipped else nullcontext(raw)
    with raw, opened as plain, TextIOWrapper(cast(IO[bytes], plain), encoding="utf-8") as file:
        yield file


def read_scenario(path: Path) -> Scenario:
    head = next(_lines(path), None)
    if not isinstance(head, dict) or head.get("format") != FORMAT or "scenario" not in head:
        raise FuzzError(f"{path} is no saved run of the fuzzer, of format {FORMAT}")
    return from_tree(head["scenario"])


def _lines(path: Path) -> Iterator[Any]:
    with open_run(path, "r") as file:
        try:
            yield from map(json.loads, file)
        except (ValueError, OSError, EOFError) as error:
            raise FuzzError(f"{path} is no saved run: {error!s:.100}") from error


# --- Differences


@dataclass(frozen=True)
class Difference:
    number: int  # of the line; 0 is the scenario
    before: tuple[str, ...]  # what came before it in both
    one: str
    other: str


def first_difference(one: Path, other: Path) -> Difference | int:
    """Or, where there is none, how many commands both have."""
    for path in (one, other):
        read_scenario(path)
    before: deque[Any] = deque(maxlen=_CONTEXT)
    number = 0
    for number, (left, right) in enumerate(zip_longest(_lines(one), _lines(other))):
        if left != right:
            shown = tuple(show(line)[:_WIDTH] for line in before)
            return Difference(number, shown, *_apart(show(left), show(right)))
        before.append(left)
    return number - 1


def _apart(one: str, other: str) -> tuple[str, str]:
    """From shortly before the place where they part."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    start = max(0, same - _WIDTH // 2)
    dots = "..." if start else ""
    return dots + one[start : start + 2 * _WIDTH], dots + other[start : start + 2 * _WIDTH]


def show(line: Any) -> str:
    match line:
        case [time, by, to, kind, values]:
            road = f"{by} > {to}" if to else by
            return f"{time:.6f} s  {road}: {kind}({_named(kind, values)})"
        case {"ended": how, "digest": digest}:
            return f"ended: {how}, digest {digest}"
        case {"scenario": scenario}:
            return f"scenario {json.dumps(scenario)}"
        case None:
            return "(nothing: this run is shorter)"
    return str(line)


def _named(kind: str, values: list[Any]) -> str:
    names = [field.name for field in fields(getattr(messages, kind))]
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in zip(names, values, strict=True))
