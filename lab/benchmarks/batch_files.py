"""Measure batch files over HTTP, on a deployment of the demo model: `python -m lab.benchmarks.batch_files`, a minute.

The benchmark uploads, checks and downloads a file of 200 MB and 50,000 lines, of which only the last is wrong; then it
sends files that no editor would write. Memory is the peak of the gateway and of the job runner above their memory
before. The baseline of the upload is `cat` into a file, with a sync.
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
from alignedserve.lab.benchmarks.common.batches import Batches, line
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.serving import NAME, Deployment, forget_peak, memory_mb, processes_under, serve

LINES, BYTES = 50_000, 200_000_000  # the limits of a file
MOST_MB = 64  # memory of a process, whatever the file's size
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

    async def timed(self, name: str, part: int, work: Callable[[], Awaitable[Any]]) -> tuple[Any, float]:
        """Return the result of the work, and its time in seconds."""
        forget_peak(part)
        before, began = memory_mb(part, "VmRSS"), perf_counter()
        found = await work()
        took_s, more = perf_counter() - began, memory_mb(part, "VmHWM") - before
        title = "gateway-0" if part == self._gateway else "jobs-0"
        report(f"{name}: {title}", more, "MB beyond its own", goal=MOST_MB)
        return found, took_s

    async def large(self, source: Path, copied_s: float) -> None:
        file, took_s = await self.timed("upload", self._gateway, lambda: self._batches.upload_from(source))
        report("upload", took_s, "s for 200 MB", baseline=copied_s)
        batch, took_s = await self.timed("check", self._runner, lambda: self._batch_of(file))
        report("check", LINES / took_s, "lines/s of 4 kB, from the batch to its verdict")
        errors = [(error["line"], error["code"]) for error in batch["errors"]["data"]]
        right = errors == [(LINES, "duplicate_custom_id")]
        report("check: wrong lines found", right, "1", goal=1, at_least=True)
        size, took_s = await self.timed("download", self._gateway, lambda: self._batches.size(file))
        report("download", took_s, "s for 200 MB")
        assert size == source.stat().st_size, f"{size} bytes came back"

    async def _batch_of(self, file: str) -> Any:
        return await self._batches.until(await self._batches.submit(file), "failed", "completed")

    async def odd(self) -> None:
        """Send lines that are too long and bytes that are not text, then unusual lines that are valid."""
        wrong = [b"x" * _LONG, b"\0" * 100, prompt_line("b", "y" * _LONG), b'{"custom_id": "\xff"}']
        wrong = [prompt_line("a"), *wrong, prompt_line("c")]
        batch, _ = await self.timed("lines of 10 MB", self._runner, lambda: self._result_of(b"\n".join(wrong)))
        errors = [(error["line"], error["code"]) for error in batch["errors"]["data"]]
        known = [(2, "line_too_long"), (3, "invalid_json"), (4, "line_too_long"), (5, "invalid_json")]
        report("odd lines found", errors == known, "1", goal=1, at_least=True)
        right = [prompt_line("a"), b"", prompt_line("b", "nul: \0"), prompt_line("c", "é\u2028")]
        batch = await self._result_of(b"\xef\xbb\xbf" + b"\r\n".join(right))
        report("odd lines answered", batch["request_counts"]["completed"], "1", goal=3, at_least=True)
        many = await self._result_of(b"\n".join(prompt_line(str(number)) for number in range(LINES + 1)))
        report("lines beyond the limit", many["errors"]["data"][0]["line"], "1", goal=LINES + 1)
        code, _ = await self.timed("too large", self._gateway, lambda: self._batches.refused(BYTES + 2_000_000))
        report("status of a file that is too large", code, "1", goal=413)
        assert code == 413

    async def _result_of(self, data: bytes) -> Any:
        return await self._batch_of(await self._batches.upload(data))

    async def all(self, source: Path, copied_s: float) -> None:
        await self._result_of(prompt_line("first"))  # warms up the deployment
        await self.large(source, copied_s)
        await self.odd()
        await self._batches.close()


def main() -> None:
    command(__doc__).parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "source"
        write(source)
        began = perf_counter()
        subprocess.run(["sh", "-c", f"cat {source} > {folder}/copy && sync {folder}/copy"], check=True)
        copied_s = perf_counter() - began
        with serve(DEMO_FOLDER, "--jobs-directory", str(folder / "jobs")) as deployment:
            asyncio.run(Run(deployment).all(source, copied_s))
    sys.exit(status())


if __name__ == "__main__":
    main()
