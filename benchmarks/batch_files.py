"""Files of batches over HTTP, to a deployment of the demo model: `python -m benchmarks.batch_files`, a minute.

A file of 200 MB and 50,000 lines, of which the last alone is wrong, is uploaded, checked and downloaded; then files as
no editor would make them. Memory is what gateway and job runner took at most beyond what they had before. The baseline
of the time of the upload is `cat` into a file that is synced.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from alignedserve.architectures.model_source import DEMO_FOLDER
from benchmarks.common.batches import Batches, line
from benchmarks.common.serving import NAME, Deployment, forget_peak, memory_mb, processes_under, serve
from benchmarks.report import report

LINES, BYTES = 50_000, 200_000_000  # as many as a file may have
MOST_MB = 64  # of a process, whatever the file's size
_LONG = 10_000_000


def prompt_line(custom_id: str, prompt: str = "Hi") -> bytes:
    return line(custom_id, {"model": NAME, "prompt": prompt, "max_tokens": 4})


def write(path: Path) -> None:
    """Write the largest file; its last line has the custom_id of the first."""
    fill = "word " * ((BYTES // LINES - len(prompt_line("0" * 6, ""))) // 5)
    with path.open("wb") as file:
        for number in range(LINES):
            file.write(prompt_line(f"{0 if number == LINES - 1 else number:06}", fill) + b"\n")


class Run:
    def __init__(self, deployment: Deployment) -> None:
        self._batches = Batches(deployment.url)
        parts = processes_under(deployment.pid)
        self._gateway, self._runner = (
            next(pid for pid, command in parts.items() if command.rstrip().endswith(name) or f" {name} " in command)
            for name in ("gateway-0", "jobs-0")
        )

    async def timed(self, name: str, part: int, work: Callable[[], Awaitable[Any]]) -> tuple[Any, float, bool]:
        """Return what came of it, how long it took, and whether the process kept its memory small."""
        forget_peak(part)
        before, began = memory_mb(part, "VmRSS"), perf_counter()
        found = await work()
        took_s, more = perf_counter() - began, memory_mb(part, "VmHWM") - before
        title = "gateway-0" if part == self._gateway else "jobs-0"
        return found, took_s, report(f"{name}: {title}", more, "MB beyond its own", goal=MOST_MB)

    async def large(self, source: Path, copied_s: float) -> bool:
        file, took_s, kept = await self.timed("upload", self._gateway, lambda: self._batches.upload_from(source))
        report("upload", took_s, "s for 200 MB", baseline=copied_s)
        batch, took_s, small = await self.timed("check", self._runner, lambda: self.ended(file))
        report("check", LINES / took_s, "lines/s of 4 kB, from the batch to its verdict")
        told = [(error["line"], error["code"]) for error in batch["errors"]["data"]]
        right = report("check: wrong lines found", told == [(LINES, "duplicate_custom_id")], "1", goal=1, at_least=True)
        size, took_s, also = await self.timed("download", self._gateway, lambda: self._batches.size(file))
        report("download", took_s, "s for 200 MB")
        return kept and small and also and right and size == source.stat().st_size

    async def ended(self, file: str) -> Any:
        return await self._batches.until(await self._batches.submit(file), "failed", "completed")

    async def odd(self) -> bool:
        """Send lines that are too long, and bytes that are no text; then odd lines that are right."""
        wrong = [b"x" * _LONG, b"\0" * 100, prompt_line("b", "y" * _LONG), b'{"custom_id": "\xff"}']
        wrong = [prompt_line("a"), *wrong, prompt_line("c")]
        batch, _, kept = await self.timed("lines of 10 MB", self._runner, lambda: self._of(b"\n".join(wrong)))
        told = [(error["line"], error["code"]) for error in batch["errors"]["data"]]
        known = [(2, "line_too_long"), (3, "invalid_json"), (4, "line_too_long"), (5, "invalid_json")]
        met = [kept, report("odd lines found", told == known, "1", goal=1, at_least=True)]
        right = [prompt_line("a"), b"", prompt_line("b", "nul: \0"), prompt_line("c", "é\u2028")]
        batch = await self._of(b"\xef\xbb\xbf" + b"\r\n".join(right))
        met.append(report("odd lines answered", batch["request_counts"]["completed"], "1", goal=3, at_least=True))
        many = await self._of(b"\n".join(prompt_line(str(number)) for number in range(LINES + 1)))
        met.append(report("lines beyond the limit", many["errors"]["data"][0]["line"], "1", goal=LINES + 1))
        status, _, kept = await self.timed("too large", self._gateway, lambda: self._batches.refused(BYTES + 2_000_000))
        met += [kept, report("status of a file that is too large", status, "1", goal=413)]
        return all(met) and status == 413

    async def _of(self, data: bytes) -> Any:
        return await self.ended(await self._batches.upload(data))

    async def all(self, source: Path, copied_s: float) -> bool:
        await self._of(prompt_line("first"))  # what a first request warms up
        met = [await self.large(source, copied_s), await self.odd()]
        await self._batches.close()
        return all(met)


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "source"
        write(source)
        began = perf_counter()
        subprocess.run(["sh", "-c", f"cat {source} > {folder}/copy && sync {folder}/copy"], check=True)
        copied_s = perf_counter() - began
        with serve(DEMO_FOLDER, "--jobs-directory", str(folder / "jobs")) as deployment:
            sys.exit(not asyncio.run(Run(deployment).all(source, copied_s)))


if __name__ == "__main__":
    main()
