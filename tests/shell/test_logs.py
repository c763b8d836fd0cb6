"""Log lines: named values serve machines and people alike, and a request is followed through all parts."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.choices import LogFormat, LogLevel
from alignedserve.config.sections import LogConfig
from alignedserve.core import Rejection
from alignedserve.protocol.messages import (
    ROUTER,
    AttemptLost,
    Batch,
    Cancel,
    Commit,
    Message,
    Prefill,
    Progress,
    Refused,
    Submit,
    Tokens,
)
from alignedserve.shell.logs import BURST, LINES_A_SECOND, set_up
from alignedserve.shell.shell import note
from tests.samples import entry, next_attempt, request

A = request("req-a")
FIELDS = {"request_id": "req-a", "attempt": 0}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    root = logging.getLogger("alignedserve")
    before = root.handlers[:], root.level, root.propagate
    hooks = logging.lastResort, sys.excepthook, threading.excepthook
    yield
    logging.lastResort, sys.excepthook, threading.excepthook = hooks
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def test_for_machines_a_line_is_json_with_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    set_up(LogConfig(format=LogFormat.JSON), "pool-0")
    logging.getLogger("alignedserve.some").info("two %s", "words", extra={"fields": {"request_id": "req-1"}})
    line = json.loads(capsys.readouterr().err)
    assert line.pop("at").endswith("+00:00")
    assert line == {"level": "info", "part": "pool-0", "message": "two words", "request_id": "req-1"}


def test_for_people_the_fields_follow_the_words(capsys: pytest.CaptureFixture[str]) -> None:
    set_up(LogConfig(), "pool-0")
    log = logging.getLogger("alignedserve.some")
    log.info("two words", extra={"fields": {"request_id": "req-1", "ttft_s": None}})
    assert capsys.readouterr().err.endswith(" INFO pool-0: two words request_id=req-1\n")
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception("broke", extra={"fields": {"request_id": "req-1"}})
    first, *traceback = capsys.readouterr().err.splitlines()
    assert first.endswith("broke request_id=req-1")
    assert traceback[-1] == "ValueError"


def _fail_at(prompt: str) -> None:
    try:
        try:
            Path(f"/nowhere/{prompt}").read_text()
        except OSError as error:
            raise KeyError(prompt) from error
    except KeyError as error:
        error.add_note(prompt) if sys.version_info >= (3, 11) else None
        raise ValueError(f"wrong: {prompt}")  # noqa: B904


async def _fail_behind_our_back(prompt: str) -> None:
    tasks = [asyncio.create_task(asyncio.to_thread(_fail_at, prompt))]
    asyncio.get_running_loop().call_soon(_fail_at, prompt)
    await asyncio.sleep(0.1)
    del tasks  # nobody has asked for its error


@pytest.mark.parametrize("format", LogFormat)
def test_an_error_is_told_by_its_place_and_not_by_its_words(format: LogFormat) -> None:
    """They may be a client's, whoever writes the line: we, asyncio, Python at the end of a thread or of the process."""
    code = (
        "import asyncio, logging, sys, threading; from tests.shell.test_logs import *;"
        "from tests.shell.test_logs import _fail_at, _fail_behind_our_back;"
        f"set_up(LogConfig(format=LogFormat({format.value!r})), 'pool-0');"
        "asyncio.run(_fail_behind_our_back('zebra'));"
        "thread = threading.Thread(target=_fail_at, args=['zebra']); thread.start(); thread.join();"
        "_fail_at('zebra')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "zebra" not in ended.stderr
    assert ended.stderr.count("FileNotFoundError: No such file or directory") == 4
    assert ended.stderr.count(", in _fail_at") == 4 * 3
    assert ended.stderr.count("pool-0") == 4
    assert f'{__file__}{chr(92) if format is LogFormat.JSON else ""}", line ' in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last == "ValueError" or json.loads(last)["traceback"].endswith("\nValueError")


class _Group(Exception):
    """Stands for ExceptionGroup, which Python 3.10 does not have."""

    exceptions = (LookupError("zebra"), OSError(2, "zebra"))


def test_each_error_of_a_group_is_told_and_none_twice(capsys: pytest.CaptureFixture[str]) -> None:
    set_up(LogConfig(), "pool-0")
    group, other = _Group("zebra"), RuntimeError("zebra")
    group.__cause__, other.__cause__ = other, group
    logging.getLogger("alignedserve.some").error("broke", exc_info=group)
    said = capsys.readouterr().err
    assert "zebra" not in said
    assert said.count("LookupError\n") == said.count("FileNotFoundError: No such") == said.count("RuntimeError\n") == 1


def test_what_clients_name_is_neither_another_line_nor_another_field(capsys: pytest.CaptureFixture[str]) -> None:
    set_up(LogConfig(), "gateway-0")
    path = '/a status=200\n2026-11-21 INFO "forged" \x1b[31m'
    logging.getLogger("alignedserve.some").info("answered", extra={"fields": {"path": path, "status": 404, "to": "é"}})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f" answered path={json.dumps(path)} status=404 to=é")


def test_less_severe_lines_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    set_up(LogConfig(level=LogLevel.WARNING), "router")
    note(ROUTER, Submit(A))
    assert capsys.readouterr().err == ""


@pytest.fixture
def clock() -> Iterator[list[float]]:
    """Yield the time of the lines, in a list. A library may have put a factory of records in place of Python's."""
    now, made = [1e9], logging.getLogRecordFactory()

    def record(*args: Any, **fields: Any) -> logging.LogRecord:
        found = made(*args, **fields)
        found.created = now[0]
        return found

    logging.setLogRecordFactory(record)
    yield now
    logging.setLogRecordFactory(made)


class TestStorms:
    def test_it_writes_few_lines_and_the_next_says_how_many_it_left_out(
        self, capsys: pytest.CaptureFixture[str], clock: list[float]
    ) -> None:
        set_up(LogConfig(), "gateway-0")
        log = logging.getLogger("alignedserve.some")

        def answered(number: int) -> None:
            log.info("answered %d", number)

        for number in range(10_000):
            clock[0] += 1e-3
            answered(number)
        log.info("another line")
        lines = capsys.readouterr().err.splitlines()
        assert BURST < len(lines) <= BURST + 10 * LINES_A_SECOND + 2
        assert lines[-1].endswith("another line")
        told = sum(int(line.partition("left_out=")[2] or 0) for line in lines)
        clock[0] += 60
        answered(10_000)
        told += int(capsys.readouterr().err.partition("left_out=")[2] or 0)
        assert told == 10_000 - (len(lines) - 1)

    def test_a_flood_hides_no_line_of_another_caller_or_place(
        self, capsys: pytest.CaptureFixture[str], clock: list[float]
    ) -> None:
        set_up(LogConfig(), "gateway-0")
        log = logging.getLogger("alignedserve.some")

        def answered(caller: str | None, status: int) -> None:
            log.info("answered", extra={"fields": {"caller": caller, "status": status}})

        for number in range(2 * BURST):
            answered(None, 401)
            answered("eve", 400)
            log.error("%s", f"the queue of {number} is full")
        flooded = len(capsys.readouterr().err.splitlines())
        assert flooded == 3 * BURST
        answered("ann", 200)
        answered("eve", 200)
        log.error("%s", "a frame is too large")
        assert len(capsys.readouterr().err.splitlines()) == 3

    def test_threads_leave_out_no_line_that_is_not_told(
        self, capsys: pytest.CaptureFixture[str], clock: list[float]
    ) -> None:
        set_up(LogConfig(), "gateway-0")
        log = logging.getLogger("alignedserve.some")

        def answered(number: int) -> None:
            for _ in range(number):
                log.info("answered")

        usual_s, threads = sys.getswitchinterval(), [threading.Thread(target=answered, args=(5_000,)) for _ in range(4)]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(usual_s)
        clock[0] += 60
        answered(1)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == BURST + 1
        assert lines[-1].endswith(f"lines_like_it_left_out={20_000 - BURST}")

    def test_a_calm_log_has_all_lines(self, capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
        set_up(LogConfig(), "gateway-0")
        for number in range(2 * BURST):
            clock[0] += 1 / LINES_A_SECOND
            logging.getLogger("alignedserve.some").info("answered %d", number)
        assert len(capsys.readouterr().err.splitlines()) == 2 * BURST

    def test_who_looks_for_a_fault_gets_all(self, capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
        set_up(LogConfig(level=LogLevel.DEBUG), "gateway-0")
        for number in range(2 * BURST):
            logging.getLogger("alignedserve.some").info("answered %d", number)
        assert len(capsys.readouterr().err.splitlines()) == 2 * BURST


@pytest.mark.parametrize(
    ("to", "message", "said"),
    [
        (ROUTER, Submit(A), "submitted"),
        ("prefill-0", Prefill(A), "goes to prefill-0"),
        ("pool-0", Commit(entry(A, (1,))), "goes to pool-0"),
        ("decode-0", Batch((entry(A, (1,)),)), "goes to decode-0"),
        (ROUTER, Progress(ended=(("req-a", 0),)), "ended"),
        (ROUTER, Progress(lost=(("req-a", 0),)), "lost"),
        (ROUTER, Cancel("req-a", 0), "cancelled"),
        ("gateway-0", Refused("req-a", 0, Rejection.QUEUED, "full", 1.0), "refused"),
        ("gateway-0", AttemptLost("req-a", 0), "lost: its owner is to start the next attempt"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_each_move_of_a_request_is_a_line(
    to: str, message: Message, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up(LogConfig(level=LogLevel.DEBUG, format=LogFormat.JSON), "some-part")
    note(to, message)
    line = json.loads(capsys.readouterr().err)
    assert line["message"] == said
    assert line.items() >= FIELDS.items()


def test_a_request_to_which_nothing_happens_has_no_line_but_its_answers(capsys: pytest.CaptureFixture[str]) -> None:
    set_up(LogConfig(), "some-part")
    note(ROUTER, Submit(A))
    note("decode-0", Batch((entry(A, (1,)),)))
    note(ROUTER, Progress(ended=(("req-a", 0),)))
    assert capsys.readouterr().err == ""
    note("gateway-0", AttemptLost("req-a", 0))
    (line,) = capsys.readouterr().err.splitlines()
    assert "lost: its owner is to start the next attempt" in line


def test_tokens_are_no_move_and_attempts_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    set_up(LogConfig(level=LogLevel.DEBUG, format=LogFormat.JSON), "some-part")
    note("gateway-0", Tokens(()))
    note("decode-0", Cancel("req-a", 0))  # sent to each holder: the owner's line says enough
    note(ROUTER, Submit(next_attempt(A)))
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["attempt"] for line in lines] == [1]
