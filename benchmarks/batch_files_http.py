"""Files of batches over HTTP, to a deployment of the demo model: `python -m benchmarks.batch_files_http`, a minute.

The file of benchmarks/batch_files.py (200 MB, 50,000 lines), whose last line alone is wrong, is uploaded, checked and
downloaded; then files as no editor would make them. Memory is what gateway and job runner took at most beyond what they
had before. The baseline of the time of the upload is `cat` into a file that is synced.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from alignedserve.store.job import Endpoint
from benchmarks import isolation
from benchmarks.batch_client import Batches
from benchmarks.batch_files import BYTES, LINES, write
from benchmarks.report import report

MOST_MB = 64  # of a process, whatever the file's size
_LONG = 10_000_000
_MIB = 1024


def line(custom_id: str, prompt: str = "Hi", **more: Any) -> bytes:
    body = {"model": isolation.NAME, "prompt": prompt, "max_tokens": 4, **more}
    whole = {"custom_id": custom_id, "method": "POST", "url": Endpoint.COMPLETIONS.value, "body": body}
    return json.dumps(whole).encode()


class Part:
    """A process of the deployment that we have started."""

    def __init__(self, name: str) -> None:
        found = [pid for pid in _ours() if f"alignedserve.shell.part {name}" in _command(pid)]
        assert len(found) == 1, f"{name} is not one process: {found}"
        self.name, self._folder = name, Path(f"/proc/{found[0]}")

    def forget_peak(self) -> float:
        (self._folder / "clear_refs").write_text("5")
        return self._mb("VmRSS")

    def peak_mb(self) -> float:
        return self._mb("VmHWM")

    def _mb(self, name: str) -> float:
        rows = (self._folder / "status").read_text().splitlines()
        return next(int(row.split()[1]) for row in rows if row.startswith(f"{name}:")) / _MIB


def _ours() -> list[int]:
    """Descendants of this process."""
    parents = {pid: _parent(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [pid for pid in parents if is_ours(pid)]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


class Run:
    def __init__(self, url: str) -> None:
        self._batches = Batches(url)
        self._gateway, self._runner = Part("gateway-0"), Part("jobs-0")

    async def timed(self, name: str, part: Part, work: Callable[[], Awaitable[Any]]) -> tuple[Any, float, bool]:
        """What came of it, how long it took, and whether the part kept its memory small."""
        before, began = part.forget_peak(), perf_counter()
        found = await work()
        took_s = perf_counter() - began
        return found, took_s, report(f"{name}: {part.name}", part.peak_mb() - before, "MB beyond its own", goal=MOST_MB)

    async def large(self, source: Path, copied_s: float) -> bool:
        file, took_s, kept = await self.timed("upload", self._gateway, lambda: self._batches.upload_from(source))
        report("upload", took_s, "s for 200 MB", baseline=copied_s)
        batch, took_s, small = await self.timed("check", self._runner, lambda: self.ended(file))
        report("check", LINES / took_s, "lines/s of 4 kB, from the batch to its verdict")
        told = [(one["line"], one["code"]) for one in batch["errors"]["data"]]
        right = report("check: wrong lines found", told == [(LINES, "duplicate_custom_id")], "1", goal=1, at_least=True)
        size, took_s, also = await self.timed("download", self._gateway, lambda: self._batches.size(file))
        report("download", took_s, "s for 200 MB")
        return kept and small and also and right and size == source.stat().st_size

    async def ended(self, file: str) -> Any:
        return await self._batches.until(await self._batches.submit(file), "failed", "completed")

    async def odd(self) -> bool:
        """Lines that are too long, and bytes that are no text; then odd ones that are right."""
        wrong = [line("a"), b"x" * _LONG, b"\0" * 100, line("b", "y" * _LONG), b'{"custom_id": "\xff"}', line("c")]
        batch, _, kept = await self.timed("lines of 10 MB", self._runner, lambda: self._of(b"\n".join(wrong)))
        told = [(one["line"], one["code"]) for one in batch["errors"]["data"]]
        known = [(2, "line_too_long"), (3, "invalid_json"), (4, "line_too_long"), (5, "invalid_json")]
        met = [kept, report("odd lines found", told == known, "1", goal=1, at_least=True)]
        right = b"\xef\xbb\xbf" + b"\r\n".join([line("a"), b"", line("b", "nul: \0"), line("c", "é\u2028")])
        batch = await self._of(right)
        met.append(report("odd lines answered", batch["request_counts"]["completed"], "1", goal=3, at_least=True))
        many = await self._of(b"\n".join(line(str(number)) for number in range(LINES + 1)))
        met.append(report("lines beyond the limit", many["errors"]["data"][0]["line"], "1", goal=LINES + 1))
        status, _, kept = await self.timed("too large", self._gateway, lambda: self._batches.refused(BYTES + 2_000_000))
        met += [kept, report("status of a file that is too large", status, "1", goal=413)]
        return all(met) and status == 413

    async def _of(self, data: bytes) -> Any:
        return await self.ended(await self._batches.upload(data))

    async def all(self, source: Path, copied_s: float) -> bool:
        await self._of(line("first"))  # what a first request warms up
        met = [await self.large(source, copied_s), await self.odd()]
        await self._batches.close()
        return all(met)


def main() -> int:
    with TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "source"
        write(source, isolation.NAME, Endpoint.COMPLETIONS, is_last_wrong=True)
        began = perf_counter()
        subprocess.run(["sh", "-c", f"cat {source} > {folder}/copy && sync {folder}/copy"], check=True)
        copied_s = perf_counter() - began
        with isolation.served(isolation.DEMO, ["--jobs-directory", str(folder / "jobs")]) as url:
            return 0 if asyncio.run(Run(url).all(source, copied_s)) else 1


if __name__ == "__main__":
    sys.exit(main())
