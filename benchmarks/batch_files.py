"""Files of batches, of 50,000 lines and of 200 MB: `python -m benchmarks.batch_files`, half a minute.

How fast they are uploaded to a gateway's application and checked line by line, and how much memory that takes beyond
what the process had. The baseline of the time is `cat` into a file that is synced.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter

from starlette.requests import Request

from alignedserve.gateway.http.uploading import receive
from alignedserve.jobs.lines import LineRules, check_file
from alignedserve.store.blobs import Blobs
from alignedserve.store.job import Endpoint
from benchmarks.report import report

LINES, BYTES, LINE_LIMIT = 50_000, 200_000_000, 4 << 20
_PIECE = 1 << 16  # as a server hands them on
_HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
_TAIL = b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
MOST_MB = 64


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        write(source, "demo", Endpoint.CHAT)
        began = perf_counter()
        subprocess.run(["sh", "-c", f"cat {source} > {folder}/copy && sync {folder}/copy"], check=True)
        copied_s = perf_counter() - began
        blobs = Blobs(f"{folder}/files")
        blobs.make()
        before = _peak_mb()
        upload_s = asyncio.run(_upload(source, blobs))
        report("batch_files.upload", upload_s, "s for 200 MB", baseline=copied_s)
        kept = report("batch_files.upload_memory", _peak_mb() - before, "MB beyond the process's own", goal=MOST_MB)
        began = perf_counter()
        with blobs.open("file-1") as file:
            verdict = check_file(file, LineRules(Endpoint.CHAT, ("demo",), LINES, LINE_LIMIT))
        assert (verdict.total, verdict.problems) == (LINES, ())
        report("batch_files.check_file", LINES / (perf_counter() - began), "lines/s of 4 kB")
        kept &= report("batch_files.memory", _peak_mb() - before, "MB, with the check_file", goal=MOST_MB)
        return 0 if kept else 1


def write(path: Path, model: str, endpoint: Endpoint, *, is_last_wrong: bool = False) -> None:
    """As many lines as a file may have, and as many bytes; the last may have the custom_id of the first."""
    with path.open("w") as file:
        for number in range(LINES):
            prompt = {"messages": [{"role": "user", "content": "_"}]} if endpoint is Endpoint.CHAT else {"prompt": "_"}
            id = 0 if is_last_wrong and number == LINES - 1 else number
            line = {
                "custom_id": f"{id:06}",
                "method": "POST",
                "url": endpoint.value,
                "body": {"model": model, **prompt},
            }
            text = json.dumps(line)
            fill = "word " * ((BYTES // LINES - len(text)) // 5)
            file.write(text.replace('"_"', f'"{fill}"') + "\n")


async def _upload(source: Path, blobs: Blobs) -> float:
    async def parts() -> AsyncIterator[bytes]:
        yield _HEAD
        with source.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece
        yield _TAIL

    given = parts()

    async def next_message() -> dict[str, object]:
        piece = await anext(given, b"")
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"multipart/form-data; boundary=b")]}
    began = perf_counter()
    writing = blobs.begin("file-1")
    await receive(Request(scope, next_message), writing, BYTES)
    writing.commit()
    return perf_counter() - began


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
