"""Tests of faults of keys and days: they wait for what has to count, and say where it does not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from alignedserve.gateway.access.keys import hash_key
from tests.chaos import faults
from tests.chaos.absent import Absent
from tests.chaos.clock import WallClock
from tests.chaos.faults import SECONDS_OF_DAY, ChangeKeys, Midnight
from tests.chaos.recording import KEYS

Answer = Callable[[str], int]  # a key -> the status


@pytest.fixture
def served() -> Iterator[tuple[Any, list[Answer]]]:
    """Yield a deployment that answers by the last function of the list."""
    answers: list[Answer] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(answers[-1](self.headers["authorization"].removeprefix("Bearer ")))
            self.send_header("content-length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}"), answers
        server.shutdown()


@pytest.mark.parametrize("follows", [True, False])
def test_a_new_key_has_to_count_and_then_no_more(
    served: tuple[Any, list[Answer]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    (deployment, answers), path = served, tmp_path / "keys.yaml"
    path.write_text(KEYS.read_text(encoding="utf-8"), encoding="utf-8")
    first, seen = path.read_bytes(), Counter[int]()

    def answer(key: str) -> int:
        read = yaml.safe_load((path if follows else KEYS).read_bytes())["keys"]
        status = 200 if hash_key(key) in {entry["hash"] for entry in read} else 401
        seen[status] += 1
        return status

    answers.append(answer)
    monkeypatch.setattr(faults, "KNOWN_S", 0.5)
    strike = ChangeKeys(path, deployment).strike(Random(1))
    if follows:
        assert asyncio.run(strike).startswith("one counts after 0.")
        assert seen.keys() == {200, 401}
    else:
        with pytest.raises(AssertionError, match="is not answered with 200 in time"):
            asyncio.run(strike)
    assert path.read_bytes() == first


@pytest.mark.parametrize("budget", ["renewed", "for ever", "none"])
def test_a_budget_ends_and_is_renewed_at_midnight(
    served: tuple[Any, list[Answer]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str
) -> None:
    try:
        clock = WallClock(tmp_path)
    except Absent as why:
        pytest.skip(str(why))
    (deployment, answers), spent = served, Counter[int]()

    def answer(_: str) -> int:
        day = 0 if budget == "for ever" else int(time.time() + clock.offset_s) // SECONDS_OF_DAY
        spent[day] += 1
        return 429 if spent[day] > 3 and budget != "none" else 200

    answers.append(answer)
    monkeypatch.setattr(faults, "KNOWN_S", 4.0)
    monkeypatch.setattr(faults, "MOST_DAILY", 5)
    strike = Midnight(clock, deployment).strike(Random(1))
    if budget == "renewed":
        assert asyncio.run(strike) == "after 3 answers of the day"
        assert 0 < clock.offset_s <= SECONDS_OF_DAY
    else:
        with pytest.raises(AssertionError, match="not answered with 200" if budget == "for ever" else "gets more"):
            asyncio.run(strike)
