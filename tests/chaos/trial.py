"""A trial: one deployment is asked calmly, then while things go wrong, then calmly again; every answer is compared."""

from __future__ import annotations

import asyncio
import json
import re
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.comparing import Difference, Undisturbed, difference
from tests.chaos.faults import Fault, Hang, Kill
from tests.chaos.load import Answer, Error, Load, ask_all, wall_clock
from tests.chaos.parts import WORKING, role_of
from tests.chaos.scenarios import Scenario, Stage
from tests.end_to_end.client import Wanted, check_greedy, documents, mixed
from tests.end_to_end.deployment import ANSWER_S, BACK_S, wait_until
from tests.end_to_end.patient import ENDED, Patient

CLIENTS = 8
LINES = 12
APART_S = 0.7  # from fault to fault, in the mean, and longer where clients wait for tokens first:
CALM, FLOWING = 0.5, 60  # how often they do, and for how many tokens
NOTED_S = 5.0  # a longer pause is in the log
GATEWAY_BACK_S = 60.0  # after a gateway was hurt, clients may find none for so long
MOST_REFUSED_S = 60.0  # for all that clients ask to be refused: a part that dies quickly is away for half a minute
BLAMING_DEATHS = 3  # workers that end in a row before the request that they ran is blamed
ENDS_OF_HANGS = (": this process ends, and starts again", "it is ended, and starts again", "was ended by SIGPROF")
PART_OF_LINE = re.compile(r"alignedserve: ([a-z]+[\w-]*) |[\d-]+ [\d:,]+ ERROR ([\w-]+): ")
DONE_S = 600.0  # for a batch to end after the last fault


@dataclass
class Row:
    """The figures of a trial: a line of the state file, and part of a row of the table."""

    scenario: str
    topology: str
    launcher: str
    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)  # by kind
    killed: Counter[str] = field(default_factory=Counter)  # parts, by role
    hung: Counter[str] = field(default_factory=Counter)  # by role, place and way
    noticed_s: float = 0.0  # the longest that any hung
    false_alarms: int = 0  # ends of parts that did not hang
    streams: int = 0  # answers that were compared, and lines of batches
    tokens: int = 0
    other: int = 0  # wrong tokens, by kind (comparing.py)
    lost: int = 0
    repeated: int = 0
    near_ties: int = 0
    broken: int = 0  # connections that broke, or were not had, while a gateway was away
    refused: int = 0  # 429 and 503
    blamed: int = 0  # requests that were given up because their workers were killed again and again
    failed: int = 0  # errors that nothing excuses
    longest_pause_s: float = 0.0  # without a token, in a stream that reached its end
    problems: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def add_difference(self, found: Difference, label: str) -> None:
        self.other += found.other
        self.lost += found.lost
        self.repeated += found.repeated
        self.near_ties += found.near_ties
        if found.is_wrong:
            self.problems.append(f"{label}: {found}")


def run(scenario: Scenario, seed: int, seconds: float, logs: Path) -> Row:
    """Return the row of a trial; what goes wrong with the trial itself is one of its problems.
    The trial leaves its log in the folder: what was hurt when, and what the deployment said."""
    row, began = Row(scenario.name, scenario.topology, scenario.launcher, seed), time.monotonic()
    try:
        with scenario.staged() as stage:
            row.absent += stage.absent
            trial = _Trial(stage, row, seed)
            try:
                trial.run(seconds)
            except Exception:
                row.problems.append(traceback.format_exc(limit=-4)[:1000])
            logs.mkdir(parents=True, exist_ok=True)
            story = [*row.problems, *sorted(trial.story), stage.deployment.whole_log()]
            (logs / f"{scenario.name}-{seed}.log").write_text("\n".join(story))
    except Exception:
        problem = traceback.format_exc(limit=-4)
        row.problems.append(problem[:1000])
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{scenario.name}-{seed}.end").write_text(problem)  # with the end of the log
    row.seconds = time.monotonic() - began
    return row


def longest_refusal(answers: Sequence[Answer]) -> float:
    """Return for how long all that clients asked was refused: from a refusal to the last one before the next tokens."""
    longest, first = 0.0, None
    for answer in sorted(answers, key=lambda answer: answer.ended_at):
        if answer.tokens:
            first = None
        elif answer.error is Error.REFUSED:
            first = answer.ended_at if first is None else first
            longest = max(longest, answer.ended_at - first)
    return longest


def num_ended_as_hung(log: str) -> int:
    """Return how many lives were ended as hung. Process and launcher may both find the same one."""
    ends, found = 0, set[str]()
    for line in log.splitlines():
        if (names := PART_OF_LINE.match(line)) is None:
            continue
        part = names[1] or names[2]
        if any(end in line for end in ENDS_OF_HANGS):
            ends += part not in found
            found.add(part)
        if "ended with" in line or "was ended by" in line:
            found.discard(part)
    return ends


class _Trial:
    def __init__(self, stage: Stage, row: Row, seed: int) -> None:
        self._deployment, self._parts, self._faults = stage.deployment, stage.parts, stage.faults
        self._row, self._seed, self._draw = row, seed, Random(seed)
        self._questions = [*mixed(20, seed, outputs=(20, 200)), *documents(6, seed, outputs=(40, 200))]
        self._undisturbed: list[Undisturbed] = []
        self.story: list[str] = []  # what was hurt when

    def run(self, seconds: float) -> None:
        url, patient = self._deployment.url, Patient(self._deployment)
        calm = asyncio.run(ask_all(url, self._questions))
        assert not any(answer.error for answer in calm), [answer.said for answer in calm if answer.error]
        check_greedy(self._questions, [answer.tokens for answer in calm])
        self._undisturbed = [Undisturbed(answer.tokens, answer.text) for answer in calm]
        lines = mixed(LINES, self._seed + 1, prompts=(3, 200), outputs=(20, 120))
        batch = patient.submit(lines)
        load = Load(url, self._questions, CLIENTS, self._seed)
        asyncio.run(self._storm(load, seconds))
        self._judge_hangs()
        for answer in load.answers:
            self._judge(answer)
        if (refused_s := longest_refusal(load.answers)) > MOST_REFUSED_S:
            self._row.problems.append(f"all that clients asked was refused for {refused_s:.0f} s")
        wait_until(lambda: self._deployment.is_ready, BACK_S, self._deployment.log)
        self._judge_batch(patient, batch, lines)
        wait_until(lambda: self._deployment.metric("num_requests_open") == 0, BACK_S, self._deployment.log)
        for answer in asyncio.run(ask_all(url, self._questions[:4])):
            self._judge(answer, is_calm=True)

    def _judge_hangs(self) -> None:
        """Note what hung, and look for parts that were ended though they did not hang."""
        row = self._row
        for fault in self._faults:
            if isinstance(fault, Hang):
                row.hung += fault.hung
                row.noticed_s = max(row.noticed_s, fault.noticed_s)
        ends = num_ended_as_hung(self._deployment.whole_log())
        row.false_alarms = max(0, ends - row.hung.total())
        if row.false_alarms:
            row.problems.append(f"{ends} parts were ended as hung, and {row.hung.total()} hung")

    async def _storm(self, load: Load, seconds: float) -> None:
        asked = asyncio.create_task(load.run())
        try:
            await self._flow(load)
            await self._hurt(load, time.monotonic() + seconds)
        finally:
            load.stop()
        await asyncio.wait_for(asked, ANSWER_S + BACK_S)

    async def _hurt(self, load: Load, until: float) -> None:
        """Strike at random times; faults of several kinds may last at once."""
        strikes: dict[asyncio.Task[None], Fault] = {}
        weights = [fault.weight for fault in self._faults]
        while time.monotonic() < until:
            (fault,) = self._draw.choices(self._faults, weights)
            lasting = [other for task, other in strikes.items() if not task.done()]
            if fault.kind in ("kills", "freezes", "hangs") or fault not in lasting:
                strikes[asyncio.create_task(self._strike(fault))] = fault
            await asyncio.sleep(self._draw.expovariate(1 / APART_S))
            if self._draw.random() < CALM:
                await self._flow(load)
        await asyncio.gather(*strikes)

    async def _strike(self, fault: Fault) -> None:
        began = wall_clock()
        if hurt := await fault.strike(self._draw):
            self._row.faults[fault.kind] += 1
            if fault.kind == Kill.kind:
                self._row.killed[role_of(hurt)] += 1
            self.story.append(f"{began} {fault.kind}, until {wall_clock()}: {hurt}")

    async def _flow(self, load: Load) -> None:
        """Wait until the clients get tokens: else nothing would run that could be hurt."""
        enough, deadline = load.num_tokens + FLOWING, time.monotonic() + BACK_S
        while load.num_tokens < enough:
            assert time.monotonic() < deadline, f"no tokens for {BACK_S} s:\n{self._deployment.log()}"
            await asyncio.sleep(0.05)

    def _judge(self, answer: Answer, is_calm: bool = False) -> None:
        """Compare the answer, and find out whether its error has an excuse. An answer without tokens and without an
        error has lost them all."""
        row, wanted = self._row, self._questions[answer.number]
        if answer.error is not None:
            self._judge_error(answer, is_calm)
            if not answer.tokens:
                return
        self._compare(wanted, self._undisturbed[answer.number], answer.tokens, answer.text, answer.error is None)
        if answer.error is None:
            row.longest_pause_s = max(row.longest_pause_s, answer.pause_s)
        if answer.pause_s > NOTED_S:
            self.story.append(f"{answer.pause_until} question {answer.number} had waited {answer.pause_s:.1f} s")

    def _judge_error(self, answer: Answer, is_calm: bool) -> None:
        row, since, until = self._row, answer.began_at, answer.ended_at
        is_cut = answer.error in (Error.AWAY, Error.BROKEN)
        if answer.error is Error.REFUSED and not is_calm:
            row.refused += 1
        elif answer.error is Error.BLAMED and self._parts.num_hurts(WORKING, since, until) >= BLAMING_DEATHS:
            row.blamed += 1
        elif is_cut and self._parts.num_hurts(("gateway",), since - GATEWAY_BACK_S, until):
            row.broken += 1
        else:
            row.failed += 1
            row.problems.append(f"question {answer.number}: {answer.said}")

    def _judge_batch(self, patient: Patient, id: str, lines: Sequence[Wanted]) -> None:
        wait_until(lambda: patient.look(id)["status"] in ENDED, DONE_S, self._deployment.log)
        batch = patient.look(id)
        num_blamed = self._num_blamed_lines()
        if batch["status"] != "completed" or batch["request_counts"]["completed"] != len(lines) - num_blamed:
            self._row.problems.append(f"batch: {json.dumps(batch)[:500]}")
            return
        rows = patient.rows(batch)
        self._row.blamed += num_blamed
        if not num_blamed and sorted(int(row["custom_id"]) for row in rows) != list(range(len(lines))):
            self._row.problems.append(f"batch: lines {sorted(row['custom_id'] for row in rows)}")
        for row in rows:
            self._compare_line(lines[int(row["custom_id"])], row["response"]["body"]["choices"][0])

    def _num_blamed_lines(self) -> int:
        """Return how many lines were failed because the job runner was hurt again and again while they ran."""
        if self._parts.num_hurts(("jobs",), 0.0, time.monotonic()) < BLAMING_DEATHS:
            return 0
        return self._deployment.whole_log().count("has ended the job runner again and again: it is failed")

    def _compare_line(self, wanted: Wanted, choice: dict[str, Any]) -> None:
        """Compare a line with transformers: no undisturbed answer was had before."""
        try:
            tally = check_greedy([wanted], [choice["token_ids"]])
            self._row.near_ties += len(tally.excused)
        except AssertionError as error:
            self._row.other += 1
            self._row.problems.append(f"line: {error}"[:500])
        self._row.streams += 1
        self._row.tokens += len(choice["token_ids"])

    def _compare(
        self, wanted: Wanted, undisturbed: Undisturbed, tokens: Sequence[int], text: str, is_whole: bool
    ) -> None:
        found = difference(wanted, undisturbed, tokens, text, is_whole)
        self._row.streams += 1
        self._row.tokens += len(tokens)
        if found is not None:
            self._row.add_difference(found, f"prompt of {len(wanted.prompt)}, {len(tokens)} tokens")
