"""Tests of what a trial makes of its history and of the deployment's log, with clients and a log that are made up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.oracle import read
from tests.chaos.parts import Parts
from tests.chaos.recording import Recorder
from tests.chaos.trial import Row, _Trial, longest_pause, num_ended_as_hung, stacks_in


@pytest.fixture
def trial(tmp_path: Path) -> _Trial:
    stage: Any = SimpleNamespace(deployment=None, parts=Parts(dict), faults=[])
    return _Trial(stage, Row("1+1", "1+1", "processes", 0), 0, Recorder(tmp_path / "history.jsonl"))


def tell(recorder: Recorder, end: Mapping[str, object], *pieces: Mapping[str, object], status: int = 200) -> None:
    id = recorder.call(key="load", method="POST", path="/v1/completions", question="q", max_tokens=2)
    recorder.write("head", id=id, status=status, retry_after=1)
    for piece in pieces:
        recorder.write("piece", id=id, **piece)
    recorder.write("end", id=id, **end)


def test_what_the_oracle_finds_are_problems_of_the_trial(trial: _Trial) -> None:
    answer = {"text": "ab", "tokens": [5, 6], "finish": "length"}
    refused = {"how": "done", "code": "not_ready", "well_formed": True}
    tell(trial.recorder, {"how": "done", "completion_tokens": 2}, answer)
    tell(trial.recorder, refused, status=503)
    tell(trial.recorder, {"how": "broken"}, {"text": "b", "tokens": [6]})
    trial.judge()
    row = trial.row
    assert (row.streams, row.tokens, row.wrong, row.near_ties, row.broken, row.refused) == (2, 3, 1, 0, 1, 1)
    assert [problem.partition(":")[0] for problem in row.problems] == ["another answer", "broken connection", "refused"]


def test_what_hurt_a_part_excuses_it(trial: _Trial) -> None:
    trial.recorder.hurt("gateway-0")
    tell(trial.recorder, {"how": "broken"}, {"text": "a", "tokens": [5]})
    tell(trial.recorder, {"how": "done", "code": "not_ready", "well_formed": True}, status=503)
    trial.judge()
    assert (trial.row.broken, trial.row.refused, trial.row.problems) == (1, 1, [])


def test_the_longest_pause_is_between_two_pieces(trial: _Trial) -> None:
    tell(trial.recorder, {"how": "done"}, *({"at": at} for at in (1.0, 1.5, 4.0, 4.5)))
    trial.recorder.flush()
    (call,) = read(trial.recorder.path).calls
    assert longest_pause(call) == 2.5


def test_a_stack_in_the_log_is_a_problem() -> None:
    stack = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n    ^^^\n{}: no\n'
    log = "INFO well\n" + stack.format("ValueError") * 2 + "INFO goes on\n" + stack.format("OSError")
    assert stacks_in(log) == ["2 stacks in the log: ValueError: no", "1 stacks in the log: OSError: no"]
    assert stacks_in("INFO a Traceback of nothing\n") == []


def test_a_life_that_process_and_launcher_find_hung_is_counted_once() -> None:
    said = "2026-11-27 10:58:34,484 ERROR decode-0: the turn loop has stood still: this process ends, and starts again"
    found = "alignedserve: decode-0 runs and has given no sign of life for 8 s: it is ended, and starts again"
    ended, other = "alignedserve: decode-0 ended with 1", "alignedserve: pool-0 was ended by SIGPROF"
    assert num_ended_as_hung("\n".join([said, found, ended])) == 1
    killed = "alignedserve: pool-0 was ended by SIGKILL"
    assert num_ended_as_hung("\n".join([said, ended, found, ended, other, killed])) == 3
