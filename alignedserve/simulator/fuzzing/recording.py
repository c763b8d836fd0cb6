"""Runs as files, and the first difference of two of them.

A file is JSON lines, gzipped where its name ends in .gz: what was run (a scenario of the fuzzer, or a trial of the
simulator), then each command of each core as [time, sender, receiver, kind, fields], then how it ended. Neither writing
nor comparing holds a run in memory.
"""

from __future__ import annotations

import gzip
import json
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass
from io import TextIOWrapper
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import IO, Any, Literal, cast

from msgspec import msgpack

from alignedserve.errors import FuzzError
from alignedserve.protocol import commands, messages
from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import Member
from alignedserve.simulator.fuzzing.scenario import Scenario, from_tree, to_tree
from alignedserve.simulator.fuzzing.typed_tree import WrongTree, typed
from alignedserve.simulator.machines.clock import Agenda
from alignedserve.simulator.machines.world import Witness
from alignedserve.simulator.reports.trial import SimulationTrial

FORMAT = 1
_CONTEXT = 5  # commands before a difference that are shown
_WIDTH = 160
_ROW = 16  # numbers in a row that a saved trial says one by one


class RunWriter(Witness):
    def __init__(self, file: IO[str], run: Scenario | SimulationTrial, agenda: Agenda) -> None:
        self._file, self._agenda = file, agenda
        if isinstance(run, SimulationTrial):
            head, self._shown = {"trial": asdict(run)}, _short  # it has millions of tokens and pairs
        else:
            head, self._shown = {"scenario": to_tree(run)}, _whole
        self._write({"format": FORMAT, **head})

    def commanded(self, by: Member, command: Command, frame: bytes) -> None:
        _, road, _, _, kind, values = msgpack.decode(frame)
        self._write([self._agenda.now, *road.split(">"), kind, self._shown(values)])

    def ended(self, how: str, digest: str) -> None:
        self._write({"ended": how, "digest": digest})

    def _write(self, line: object) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), default=bytes.hex) + "\n")


def _whole(value: Any) -> Any:
    return value


def _short(value: Any) -> Any:
    """Of many numbers in a row how many they are, and a sum that tells them from others."""
    if not isinstance(value, list):
        return value
    if len(value) > _ROW and all(type(one) is int for one in value):
        return f"{len(value)} numbers {zlib.crc32(_words(value)):08x}"
    return [_short(one) for one in value]


def _words(numbers: list[int]) -> bytes:
    try:
        return array("q", numbers).tobytes()
    except OverflowError:  # names of pages have no sign
        return array("Q", numbers).tobytes()


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
    tree = _head(path, "scenario", "the fuzzer")
    try:
        return from_tree(tree)
    except FuzzError as error:
        raise FuzzError(f"{path}: {error}") from error


def read_trial(path: Path) -> SimulationTrial:
    tree = _head(path, "trial", "the simulator")
    try:
        trial: SimulationTrial = typed(SimulationTrial, tree)
    except WrongTree as error:
        raise FuzzError(f"{path}: this is no trial of this version: {error}") from None
    return trial


def _head(path: Path, what: str, whose: str) -> Any:
    head = next(_lines(path), None)
    if not isinstance(head, dict) or head.get("format") != FORMAT or what not in head:
        raise FuzzError(f"{path} is no saved run of {whose}, of format {FORMAT}")
    return head[what]


def _lines(path: Path) -> Iterator[Any]:
    with open_run(path, "r") as file:
        try:
            for number, line in enumerate(file, 1):
                yield _json(line, number)
        except (ValueError, OSError, EOFError, RecursionError, zlib.error) as error:
            raise FuzzError(f"{path} is no saved run: {error!s:.100}") from error


def _json(line: str, number: int) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, times in Counter(key for key, _ in pairs).items():
            if times > 1:
                raise ValueError(f"line {number} has {key} {times} times in one object")
        return dict(pairs)

    try:
        return json.loads(line, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is not valid JSON: {error.msg}") from None


# --- Differences


@dataclass(frozen=True)
class Difference:
    number: int  # of the line; 0 is the scenario
    before: tuple[str, ...]  # what came before it in both
    one: str
    other: str


def first_difference(one: Path, other: Path, read: Callable[[Path], object] = read_scenario) -> Difference | int:
    """Or, where there is none, how many commands both have. `read` refuses what is no such run."""
    for path in (one, other):
        read(path)
    before: deque[Any] = deque(maxlen=_CONTEXT)
    number = 0
    for number, (left, right) in enumerate(zip_longest(_lines(one), _lines(other))):
        if left != right:
            shown = tuple(show(line)[:_WIDTH] for line in before)
            return Difference(number, shown, *_apart(show(left), show(right)))
        before.append(left)
    return number - 1


def said(found: Difference | int, one: str, other: str) -> str:
    if isinstance(found, int):
        return f"the same: {found} commands"
    before = [f"    {line}" for line in found.before]
    apart = [f"{one}:", f"  - {found.one}", f"{other}:", f"  + {found.other}"]
    return "\n".join([f"they differ first in line {found.number + 1}:", *before, *apart])


def _apart(one: str, other: str) -> tuple[str, str]:
    """From shortly before the place where they part."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    start = max(0, same - _WIDTH // 2)
    dots = "..." if start else ""
    return dots + one[start : start + 2 * _WIDTH], dots + other[start : start + 2 * _WIDTH]


def show(line: Any) -> str:
    match line:
        case [int() | float() as time, str(by), str(to), str(kind), list(values)]:
            road = f"{by} > {to}" if to else by
            return f"{time:.6f} s  {road}: {kind}({_named(kind, values)})"
        case {"ended": how, "digest": digest}:
            return f"ended: {how}, digest {digest}"
        case {"scenario": scenario}:
            return f"scenario {json.dumps(scenario)}"
        case {"trial": trial}:
            return f"trial {json.dumps(trial)}"
        case None:
            return "(nothing: this run is shorter)"
    return str(line)


def _named(kind: str, values: list[Any]) -> str:
    """With the names of its fields, unless another version wrote it, which called or cut it otherwise."""
    known = getattr(commands, kind, None) or getattr(messages, kind, None)
    names = [field.name for field in fields(known)] if is_dataclass(known) else []
    if len(names) != len(values):
        return ", ".join(map(json.dumps, values))
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in zip(names, values, strict=True))
