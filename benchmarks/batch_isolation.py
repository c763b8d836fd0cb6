"""Chats over HTTP beside a batch job over HTTP: `python -m benchmarks.isolation`, its documents being lines of a file.

    python -m benchmarks.batch_isolation [--seconds 30] [--rate 2] [--model FOLDER] [-- SERVE FLAGS]

Chats, documents, promises and goals are those of benchmarks/isolation.py. There as many best-effort requests as --be
are always open; here a file has more lines than can be done, and the job runner opens as many as it sees room for. BE
tokens are what the batch's usage grows by while chats come, from the end of the first third of a run, when lines end as
they begin: some ten lines are open at both ends, so that is off by ten tokens a second and more in runs of 30 s.
Between two runs nobody asks for 10 s, so that documents are not held to what the chats before needed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks import isolation
from benchmarks.batch_client import ENDED, Batches, jsonl
from benchmarks.models import VOCAB

_LINES = 2_000  # more than are done
_APART_S = 10.0


def document(draw: Random, model: str) -> dict[str, Any]:
    size, most = draw.randint(*isolation.DOCUMENT), draw.randint(*isolation.SUMMARY)
    prompt = [draw.randrange(3, VOCAB) for _ in range(size)]
    return {"model": model, "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}


class BatchLoad(isolation.Load):
    """Best-effort requests are the lines of one batch, which is cancelled at the end of a run."""

    def __init__(self, url: str, model: str, rate: float, seconds: float) -> None:
        super().__init__(url, model, rate, seconds, num_documents=0)
        self._batches = Batches(url)
        self._file: str | None = None

    async def run(self, promise: isolation.Promise | None, *, with_documents: bool) -> isolation.Run:
        if not with_documents:
            return await super().run(promise, with_documents=False)
        await asyncio.sleep(_APART_S)
        if self._file is None:
            draw = Random(isolation.SEED + 1)
            self._file = await self._batches.upload(jsonl(document(draw, self._model) for _ in range(_LINES)))
        batch = await self._batches.submit(self._file)
        await self._batches.until(batch, "in_progress")
        begun = perf_counter()
        chats = asyncio.create_task(self._chats(promise, begun + isolation.HEAD_START_S, begun + self._seconds))
        at, before = await self._usage(batch, begun + isolation.COUNTED_FROM * self._seconds)
        ended_at, after = await self._usage(batch, begun + self._seconds)
        answers = await chats
        failed = (await self._batches.look(batch))[0]["request_counts"]["failed"]
        await self._batches.cancel(batch)
        await self._batches.until(batch, *ENDED)
        lines = [isolation.Answer(begun, 500) for _ in range(failed)]
        if after > before:
            lines.append(isolation.Answer(begun, 200, after - before, [at] * (after - before)))
        return isolation.Run(ended_at - at, answers, lines, (at, ended_at))

    async def _usage(self, batch: str, at: float) -> tuple[float, int]:
        """When it was looked at, and the output tokens of lines that had ended."""
        await asyncio.sleep(max(0.0, at - perf_counter()))
        found, _ = await self._batches.look(batch)
        return perf_counter(), found["usage"]["output_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals in each run (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=2.0, help="chats in a second (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a model folder with a tokenizer, in place of random weights")
    parser.add_argument("flags", nargs="*", help="more flags for `alignedserve serve`, after --")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = args.model or isolation.random_model(Path(folder))
        flags = ["--jobs-directory", str(Path(folder, "jobs")), *args.flags]
        with isolation.served(model, flags) as url:
            met = asyncio.run(_runs(url, args.rate, args.seconds))
    sys.exit(0 if met else 1)


async def _runs(url: str, rate: float, seconds: float) -> bool:
    return await isolation.runs(BatchLoad(url, isolation.NAME, rate, seconds))


if __name__ == "__main__":
    main()
