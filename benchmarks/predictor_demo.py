"""What the demo model says to prompts of its own corpus, and how long: asked of a server, kept in a file."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

_MODEL, _AT_ONCE, _PATIENCE_S, _MOST = "demo", 32, 600.0, 640
Row = tuple[str, str, tuple[int, ...], int]  # kind, text, prompt, tokens of the answer


def said_by_demo(path: Path, count: int) -> list[Row]:
    if not path.exists():
        with _served() as url:
            rows = asyncio.run(_asked(url, _conversations(count)))
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [(kind, text, tuple(prompt), length) for kind, text, prompt, length in map(json.loads, file)]


def _conversations(count: int) -> list[tuple[str, list[dict[str, str]]]]:
    from demo_corpus import Draw, Split, sample

    draws = (Draw(f"asked {number}", Split.HELD_OUT) for number in range(count))
    return [(one.kind, one.messages) for one in map(sample, draws)]


async def _asked(url: str, conversations: Sequence[tuple[str, list[dict[str, str]]]]) -> list[Row]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def ask(kind: str, messages: list[dict[str, str]]) -> Row:
        body: dict[str, Any] = {"model": _MODEL, "messages": messages, "temperature": 0, "max_tokens": _MOST}
        async with places:
            answer = (await client.post("/v1/chat/completions", json=body | {"return_token_ids": True})).json()
        text = "\n".join(one["content"] for one in messages)
        return kind, text, tuple(answer["prompt_token_ids"]), answer["usage"]["completion_tokens"]

    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S) as client:
        return await asyncio.gather(*(ask(*one) for one in conversations))


@contextmanager
def _served() -> Iterator[str]:
    command = [sys.executable, "-m", "alignedserve", "serve", _MODEL, "--port", "0", "--served-model-name", _MODEL]
    command += ["--topology", "colocated", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield next(found[0] for line in server.stdout if (found := re.findall(r"http://[\d.]+:\d+", line)))
        finally:
            server.send_signal(signal.SIGINT)
