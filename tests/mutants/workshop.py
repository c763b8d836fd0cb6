"""Plant mutants in a copy of the repository, and run the unit tests and the fuzzer there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutants.mutant import SOURCE, Mutant
from tests.mutants.nearest import is_there, nearest_first

_CODE = ("alignedserve", "router", "prefill_worker", "decode_worker", "kvpool", "kernels")
_COPIED = (*_CODE, "tests", "tools", "pyproject.toml")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "csrc", "end_to_end", "third_party")
_TESTS_S = 900.0  # the tests take less; a mutant that makes them wait for ever is found
_OPTIONS = ("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:schemathesis")  # a plugin that starts slowly
_TRIED = (0, 1, 2, 5)  # what pytest returns: all passed, some failed, some could not be collected, all deselected
_TOO_LONG = "takes too long"


class Workshop:
    """A copy of the repository. What fails in it without the mutant kills no mutant."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._checked: set[str] = set()  # files of unit tests
        self._broken: list[str] = []  # tests in them that fail without a mutant
        for name in _COPIED:
            source, to = SOURCE / name, root / name
            if source.is_dir():
                shutil.copytree(source, to, symlinks=True, ignore=_LEFT_OUT)
            else:
                shutil.copy(source, to)

    def failing_test(self, mutant: Mutant, known: str) -> str:
        """Return the first unit test that fails: `known` is tried first, then those near the mutated file."""
        groups = ([known] if known and is_there(known) else [], *nearest_first(mutant))
        return next(filter(None, (self._first_failing(mutant, tests) for tests in groups if tests)), "")

    def failing_seed(self, mutant: Mutant, seeds: range) -> str:
        """Return the first seed that fails, and the rule that it breaks."""
        while seeds:
            with self._planted(mutant):
                failure = self._fuzz(seeds)
            if not failure:
                return ""
            seed = int(failure.partition(":")[0])
            if not self._fuzz(range(seed, seed + 1)):
                return failure
            seeds = range(seed + 1, seeds.stop)
        return ""

    def _first_failing(self, mutant: Mutant, tests: Sequence[str]) -> str:
        self.check(tests)
        with self._planted(mutant):
            return next(iter(self._test("-x", *(f"--deselect={test}" for test in self._broken), *tests)), "")

    def check(self, tests: Iterable[str]) -> None:
        """Find out which tests fail without a mutant, too."""
        files = {test.partition("::")[0] for test in tests} - self._checked
        if files:
            broken = self._test(*sorted(files))
            if unusable := [name for name in broken if "::" not in name]:
                raise RuntimeError(f"without a mutant, too: {unusable}")
            self._broken += broken
            self._checked |= files

    @contextmanager
    def _planted(self, mutant: Mutant) -> Iterator[None]:
        file = self._root / mutant.file
        source = file.read_text(encoding="utf-8")
        self._write(file, mutant.plant(self._root))
        try:
            yield
        finally:
            self._write(file, source)

    def _write(self, file: Path, source: str) -> None:
        """Write a source file, and remove what Python has compiled: it may look as old as the file."""
        file.write_text(source, encoding="utf-8")
        Path(cache_from_source(str(file))).unlink(missing_ok=True)

    def _fuzz(self, seeds: range) -> str:
        return self._run("tests.mutants.first_failure", str(seeds.start), str(len(seeds))).stdout.strip()

    def _test(self, *arguments: str) -> list[str]:
        """Run unit tests, and return those that fail."""
        try:
            ran = self._run("pytest", *_OPTIONS, *arguments, timeout_s=_TESTS_S)
        except subprocess.TimeoutExpired:
            return [_TOO_LONG]
        if ran.returncode not in _TRIED:
            raise RuntimeError(ran.stdout + ran.stderr)
        return failed_tests(ran.stdout)

    def _run(self, module: str, *arguments: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self._root,
            env=os.environ | {"PYTHONPATH": str(self._root)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def failed_tests(printed: str) -> list[str]:
    """Return the tests, or files of tests, that pytest's summary names; lines of logs begin with ERROR too."""
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return [line.partition(" ")[2].partition(" - ")[0] for line in failed]


@contextmanager
def workshop() -> Iterator[Workshop]:
    with TemporaryDirectory(prefix="mutants-") as root:
        yield Workshop(Path(root))
