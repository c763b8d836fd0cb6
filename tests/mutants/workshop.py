"""Plant a mutant in a copy of the repository, and run the fuzzer and the unit tests of its folder there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutants.mutant import SOURCE, Mutant

_COPIED = ("alignedserve", "router", "prefill_worker", "decode_worker", "kvpool", "kernels", "tests", "pyproject.toml")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "csrc", "end_to_end", "third_party")
_TESTS_S = 900.0  # the tests of a folder take less; a mutant that makes them wait for ever is found


@dataclass(frozen=True)
class Finding:
    """What found a mutant: empty texts where it was not found."""

    mutant: Mutant
    seed: str  # the first seed that fails, and the rule that it breaks
    test: str  # the first unit test that fails

    @property
    def is_found(self) -> bool:
        return bool(self.seed or self.test)


class Workshop:
    """A copy of the repository."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for name in _COPIED:
            source, to = SOURCE / name, root / name
            if source.is_dir():
                shutil.copytree(source, to, symlinks=True, ignore=_LEFT_OUT)
            else:
                shutil.copy(source, to)

    def look(self, mutant: Mutant, seeds: range, runs_tests: bool) -> Finding:
        """Return what finds the mutant."""
        file = self._root / mutant.file
        source = file.read_text(encoding="utf-8")
        file.write_text(mutant.plant(), encoding="utf-8")
        try:
            seed = self._run("tests.mutants.first_failure", str(seeds.start), str(len(seeds))).stdout.strip()
            return Finding(mutant, seed, self._failing_test(mutant) if runs_tests else "")
        finally:
            file.write_text(source, encoding="utf-8")

    def _failing_test(self, mutant: Mutant) -> str:
        try:
            ran = self._run("pytest", "-qx", "--no-header", "-p", "no:cacheprovider", mutant.tests, timeout_s=_TESTS_S)
        except subprocess.TimeoutExpired:
            return "takes too long"
        failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].partition(" ")[2].partition(" - ")[0] if failed else ""

    def _run(self, module: str, *arguments: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self._root,
            env=os.environ | {"PYTHONPATH": str(self._root), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@contextmanager
def workshop() -> Iterator[Workshop]:
    with TemporaryDirectory(prefix="mutants-") as root:
        yield Workshop(Path(root))


def table(findings: Sequence[Finding]) -> str:
    """Return the table of all mutants as Markdown, and how many were found."""
    rows = [(found.mutant.name, found.mutant.file, found.seed, found.test) for found in findings]
    lines = ["| mutant | in | fuzzer: seed, rule | unit test |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(cell or '-' for cell in row)} |" for row in rows]
    both = sum(bool(found.seed) and bool(found.test) for found in findings)
    seeds, tests = sum(bool(found.seed) for found in findings), sum(bool(found.test) for found in findings)
    num_found = sum(found.is_found for found in findings)
    summary = f"{num_found} of {len(findings)} found: {seeds} by seeds, {tests} by unit tests, {both} by both"
    return "\n".join([*lines, "", summary])
