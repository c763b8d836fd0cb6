"""Keep what trials gave in a file, a line for each as it ends: an interrupted command goes on from there.

The first line is a digest of the code. What other code gave is not read, and makes room for what this code gives.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import alignedserve
from alignedserve.errors import SimulateError, file_errors
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.trial import SimulationTrial

NAME = "runs.jsonl"
_INPUTS = (".py", ".json", ".yaml", ".csv", ".lua")  # files of the package that a simulation may read

Values: TypeAlias = Mapping[str, float]  # metric, as a path of `RunFigures` -> value


class KeptRuns:
    """The values of the trials that have ended. Without a file they are kept only as long as the command runs."""

    def __init__(self, metrics: Sequence[str], path: Path | None = None) -> None:
        self._metrics, self._path = metrics, path
        self._values: dict[str, Values] = {}
        self._head = "" if path is None else json.dumps({"code": _digest_of_code()})
        if path is None:
            return
        if path.exists():
            self._values.update(self._read(path.read_text(encoding="utf-8")))
        new = path.with_suffix(".new")  # without what is cut off
        self._write("w", self._head, *map(_line, self._values, self._values.values()), path=new)
        os.replace(new, path)

    def __contains__(self, trial: SimulationTrial) -> bool:
        return repr(trial) in self._values

    def __getitem__(self, trial: SimulationTrial) -> Values:
        return self._values[repr(trial)]

    def add(self, trial: SimulationTrial, figures: RunFigures) -> None:
        key = repr(trial)
        self._values[key] = {metric: figures.at(metric) for metric in self._metrics}
        if self._path is not None:
            self._write("a", _line(key, self._values[key]), path=self._path)

    @staticmethod
    def _write(mode: str, *lines: str, path: Path) -> None:
        with file_errors(SimulateError, path), path.open(mode, encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)

    def _read(self, text: str) -> Iterator[tuple[str, Values]]:
        """Yield the trials with all these metrics; a command that was killed may have left half a line."""
        head, *lines = text.splitlines() or [""]
        for line in lines if head == self._head else ():
            with suppress(ValueError, KeyError, TypeError):
                tree = json.loads(line)
                yield tree["trial"], {metric: float(tree["values"][metric]) for metric in self._metrics}


def _line(trial: str, values: Values) -> str:
    return json.dumps({"trial": trial, "values": values})


def _digest_of_code() -> str:
    """Return a digest of all that decides what a simulation gives, but for what the trial itself says."""
    digest, package = hashlib.blake2b(digest_size=16), Path(alignedserve.__file__).parent
    folders = os.walk(package, followlinks=True)  # in a checkout some of its folders are links
    for path in sorted(Path(folder, name) for folder, _, names in folders for name in names if name.endswith(_INPUTS)):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
