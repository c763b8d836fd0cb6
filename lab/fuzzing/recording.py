"""Write runs to files, and find the first difference of two files.

A file is JSON lines, gzipped if its name ends in .gz: first the input (a scenario of the fuzzer, or a trial of the
simulator), then each command of each core as [time, sender, receiver, kind, fields], then how the run ended. Neither
writing nor comparing holds a run in memory.
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
from tempfile import TemporaryDirectory
from typing import IO, Any, Literal, cast, get_args

from msgspec import msgpack

from alignedserve.errors import FuzzError, file_errors
from alignedserve.lab.fuzzing.scenario import Scenario, from_tree, to_tree
from alignedserve.lab.fuzzing.typed_tree import WrongTree, typed
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.machines.clock import Agenda
from alignedserve.lab.simulator.machines.process import Witness
from alignedserve.protocol import commands
from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import Member, Message

FORMAT = 1
_CONTEXT = 5  # number of commands that are shown before a difference
_WIDTH = 160
_ROW = 16  # longest list of numbers that a saved trial holds in full
_MESSAGES = {kind.__name__: kind for kind in get_args(Message)}


class RunWriter(Witness):
    """Write the commands of a run to a file as they happen."""

    def __init__(self, file: IO[str], run: Scenario | SimulationTrial, agenda: Agenda) -> None:
        self._file, self._agenda = file, agenda
        if isinstance(run, SimulationTrial):
            head, self._shown = {"trial": asdict(run)}, _short  # a trial has millions of tokens and pairs
        else:
            head, self._shown = {"scenario": to_tree(run)}, lambda value: value
        self._write({"format": FORMAT, **head})

    def commanded(self, by: Member, command: Command, frame: bytes) -> None:
        _, road, _, _, kind, values = msgpack.decode(frame)
        self._write([self._agenda.now, *road.split(">"), kind, self._shown(values)])

    def write_end(self, how: str, digest: str) -> None:
        self._write({"ended": how, "digest": digest})

    def _write(self, line: object) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), default=bytes.hex) + "\n")


def _short(value: Any) -> Any:
    """Return the value with each long list of numbers replaced by its length and a checksum."""
    if not isinstance(value, list):
        return value
    if len(value) > _ROW and all(type(number) is int for number in value):
        return f"{len(value)} numbers {zlib.crc32(_words(value)):08x}"
    return [_short(member) for member in value]


def _words(numbers: list[int]) -> bytes:
    try:
        return array("q", numbers).tobytes()
    except OverflowError:  # names of pages are unsigned
        return array("Q", numbers).tobytes()


@contextmanager
def open_run(path: Path, mode: Literal["r", "w"]) -> Iterator[IO[str]]:
    """Open the file of a run. The same run gives the same bytes: gzip's time stamp is left out."""
    with file_errors(FuzzError, path, "opened"):
        raw = path.open(f"{mode}b")
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
        raise FuzzError(f"{path}: this is not a trial of this version: {error}") from None
    return trial


def _head(path: Path, key: str, program: str) -> Any:
    head = next(_lines(path), None)
    if not isinstance(head, dict) or head.get("format") != FORMAT or key not in head:
        raise FuzzError(f"{path} is not a saved run of {program}, of format {FORMAT}")
    return head[key]


def _lines(path: Path) -> Iterator[Any]:
    with open_run(path, "r") as file:
        try:
            for number, line in enumerate(file, 1):
                yield _json(line, number)
        except (ValueError, OSError, EOFError, RecursionError, zlib.error) as error:
            raise FuzzError(f"{path} is not a saved run: {error!s:.100}") from error


def _json(line: str, number: int) -> Any:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, times in Counter(key for key, _ in pairs).items():
            if times > 1:
                raise ValueError(f"line {number} has {key} {times} times in one object")
        return dict(pairs)

    try:
        return json.loads(line, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is not valid JSON: {error.msg}") from None


# --- Differences


@dataclass(frozen=True)
class Difference:
    number: int  # number of the line; 0 is the input of the run
    before: tuple[str, ...]  # the commands before it, the same in both files
    left: str
    right: str


def first_difference(left: Path, right: Path, read: Callable[[Path], object] = read_scenario) -> Difference | int:
    """Return the first difference, or the number of commands if the files are the same.

    `read` raises FuzzError for a file that is no run of its kind.
    """
    for path in (left, right):
        read(path)
    before: deque[Any] = deque(maxlen=_CONTEXT)
    number = 0
    for number, (left_line, right_line) in enumerate(zip_longest(_lines(left), _lines(right))):
        if left_line != right_line:
            shown = tuple(show(line)[:_WIDTH] for line in before)
            return Difference(number, shown, *_around_difference(show(left_line), show(right_line)))
        before.append(left_line)
    return number - 1


def repeated(
    saved: Path, run: Callable[[Path], object], read: Callable[[Path], object] = read_scenario
) -> Difference | int:
    """Run again what was saved, and return the first difference, as `first_difference` does."""
    with TemporaryDirectory() as folder:
        again = Path(folder) / f"again{saved.suffix}"
        run(again)
        return first_difference(saved, again, read)


def tell(found: Difference | int, first: str = "saved", second: str = "this time") -> int:
    """Print it, and return the status: 0 where all is the same, as of `diff`."""
    print(difference_text(found, first, second))
    return 0 if isinstance(found, int) else 1


def difference_text(found: Difference | int, left: str, right: str) -> str:
    if isinstance(found, int):
        return f"the same: {found} commands"
    before = [f"    {line}" for line in found.before]
    both = [f"{left}:", f"  - {found.left}", f"{right}:", f"  + {found.right}"]
    return "\n".join([f"they differ first in line {found.number + 1}:", *before, *both])


def _around_difference(left: str, right: str) -> tuple[str, str]:
    """Return both texts from shortly before the place where they differ."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
    start = max(0, same - _WIDTH // 2)
    dots = "..." if start else ""
    return dots + left[start : start + 2 * _WIDTH], dots + right[start : start + 2 * _WIDTH]


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
    """Return the values with the names of the fields, or without names if another version had other fields."""
    known = getattr(commands, kind, None) or _MESSAGES.get(kind)
    names = [field.name for field in fields(known)] if is_dataclass(known) else []
    if len(names) != len(values):
        return ", ".join(map(json.dumps, values))
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in zip(names, values, strict=True))
