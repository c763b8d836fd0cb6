"""A trial: one deployment is asked calmly, then while things go wrong, then calmly again; every answer is compared."""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random

from tests.chaos.comparing import near_ties
from tests.chaos.faults import Fault, Hang, Kill, PauseAll
from tests.chaos.load import Keeper, Load, run_batch
from tests.chaos.oracle import Call, anomalies, read
from tests.chaos.parts import role_of
from tests.chaos.recording import Client, Question, Recorder, connected
from tests.chaos.scenarios import Scenario, Stage
from tests.demo_conversations import conversations
from tests.end_to_end.client import Wanted, check_greedy, documents, mixed
from tests.end_to_end.deployment import ANSWER_S, BACK_S, wait_until

CLIENTS = 8
CHATS = 6
LINES = 12
OF_PARTS = ("kills", "freezes", "hangs")  # kinds of faults that hurt a part
APART_S = 0.7  # from fault to fault, in the mean, and longer where clients wait for tokens first, if there are rests:
CALM, FLOWING = 0.5, 60  # how often they do, and for how many tokens
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
    streams: int = 0  # answers, lines of batches too
    tokens: int = 0
    wrong: int = 0  # answers that are not the undisturbed ones
    near_ties: int = 0  # answers that are not, and excused by the reference (tests/reference.py)
    broken: int = 0  # connections that broke, or were not had
    refused: int = 0  # 429 and 503, of a key without limits
    blamed: int = 0  # requests that were given up because their workers were killed again and again
    longest_pause_s: float = 0.0  # without a token, in a stream that reached its end
    problems: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


def run(scenario: Scenario, seed: int, seconds: float, logs: Path) -> Row:
    """Return the row of a trial; what goes wrong with the trial itself is one of its problems.
    The trial leaves its log in the folder: what was hurt when, and what the deployment said."""
    row, began = Row(scenario.name, scenario.topology, scenario.launcher, seed), time.monotonic()
    try:
        with scenario.staged() as stage:
            row.absent += stage.absent
            recorder = Recorder(logs / f"{scenario.name}-{seed}.history.jsonl")
            trial = _Trial(stage, row, seed, recorder, scenario.rests)
            try:
                asyncio.run(trial.run(seconds))
            except Exception:
                row.problems.append(traceback.format_exc(limit=-4)[:1000])
            trial.judge()
            row.problems += stacks_in(stage.deployment.whole_log()) if scenario.launcher == "processes" else []
            recorder.close()
            story = [*row.problems, *sorted(trial.story), stage.deployment.whole_log()]
            (logs / f"{scenario.name}-{seed}.log").write_text("\n".join(story))
    except Exception:
        problem = traceback.format_exc(limit=-4)
        row.problems.append(problem[:1000])
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{scenario.name}-{seed}.end").write_text(problem)  # with the end of the log
    row.seconds = time.monotonic() - began
    return row


def wall_clock() -> str:
    return datetime.now().isoformat(timespec="milliseconds")


def longest_pause(call: Call) -> float:
    """Return the longest time between two pieces of an answer."""
    times = [float(piece["at"]) for piece, _ in call.pieces]
    return max([0.0, *(later - earlier for earlier, later in pairwise(times))])


def stacks_in(log: str) -> list[str]:
    """Return a problem for each kind of error whose stack is in the log: no fault from outside is worth a stack."""
    ends = re.findall(r"^Traceback .*\n(?:[ ].*\n)+(\S.*)", log, re.MULTILINE)
    return [f"{number} stacks in the log: {error:.200}" for error, number in Counter(ends).items()]


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
    def __init__(self, stage: Stage, row: Row, seed: int, recorder: Recorder, rests: bool = True) -> None:
        self._rests = rests
        self._deployment, self._parts, self._faults = stage.deployment, stage.parts, stage.faults
        self.row, self._draw, self.recorder = row, Random(seed), recorder
        self._parts.note = recorder.hurt
        completions = [*mixed(20, seed, outputs=(20, 200)), *documents(6, seed, outputs=(40, 200))]
        said = self._draw.sample(conversations(), CHATS)
        self._chats = [Question.of_chat(each.messages, self._draw.randint(20, 200)) for each in said]
        self._stored = [Question.to_keep(each.messages[-1]["content"], 40) for each in said]
        self._lines = [Question.of(wanted) for wanted in completions]
        self._small = [Question.of(wanted) for wanted in mixed(8, seed, prompts=(3, 12), outputs=(2, 6))]
        self._prompts: dict[str, list[int]] = {question.name: question.body["prompt"] for question in self._small}
        self.story: list[str] = []  # what was hurt when

    async def run(self, seconds: float) -> None:
        url = self._deployment.url
        async with connected(url, "load") as many, connected(url, "limited") as few:
            await self._run(Client(many, self.recorder), Client(few, self.recorder, "limited"), seconds)

    async def _run(self, client: Client, limited: Client, seconds: float) -> None:
        log = self._deployment.log
        questions = [*self._lines, *self._chats]
        await self._ask_calmly(client, questions)
        load, keeper = Load(client, questions, CLIENTS, self.row.seed), Keeper(client, self._stored, self.row.seed)
        small = Load(limited, self._small, 2, self.row.seed)
        running = [asyncio.create_task(each.run()) for each in (load, keeper, small)]
        batch = asyncio.create_task(run_batch(client, self._lines[:LINES]))
        try:
            await self._flow(client)
            await self._hurt(client, time.monotonic() + seconds)
        finally:
            for each in (load, keeper, small):
                each.stop()
        await asyncio.wait_for(asyncio.gather(*running), ANSWER_S + BACK_S)
        self._judge_hangs()
        await asyncio.to_thread(wait_until, lambda: self._deployment.is_ready, BACK_S, log)
        await asyncio.wait_for(batch, DONE_S)
        await asyncio.to_thread(
            wait_until, lambda: self._deployment.metric("num_requests_open", "as-chaos-load") == 0, BACK_S, log
        )
        self.recorder.write("calm")
        await keeper.read_all()
        await asyncio.gather(*map(client.ask, questions[:4]))

    async def _ask_calmly(self, client: Client, questions: Sequence[Question]) -> None:
        """Ask each question, and check the undisturbed answers."""
        seen = await asyncio.gather(*map(client.ask, questions))
        assert all(each.is_good for each in seen), [each.end for each in seen if not each.is_good]
        self._prompts |= {question.name: each.prompt for question, each in zip(questions, seen, strict=True)}
        wanted = [
            Wanted(tuple(each.prompt), question.max_tokens, True, bool(question.body.get("ignore_eos")))
            for question, each in zip(questions, seen, strict=True)
        ]
        check_greedy(wanted, [each.tokens for each in seen])

    def judge(self) -> None:
        """Have the oracle read the history; near ties are right answers too."""
        row = self.row
        self.recorder.flush()
        for tie in near_ties(read(self.recorder.path), self._prompts):
            row.near_ties += 1
            self.recorder.write("right", question=tie.question, text=tie.text, tokens=tie.tokens, finish=tie.finish)
        self.recorder.flush()
        history = read(self.recorder.path)
        found = anomalies(history)
        row.problems += map(str, found)
        row.wrong += sum(each.kind == "another answer" for each in found)
        answers = [call for call in history.calls if call.answer.question]
        lines = [answer for batch in history.batches for answer in batch.answers]
        row.streams += len(lines) + sum(bool(call.pieces) for call in answers)
        row.tokens += sum(len(answer.tokens) for answer in (*lines, *(call.answer for call in answers)))
        ends = Counter(call.outcome for call in history.calls if call.key not in history.limited)
        row.broken, row.refused, row.blamed = ends["broken"] + ends["away"], ends["refused"], ends["blamed"]
        row.longest_pause_s = max([0.0, *(longest_pause(call) for call in answers if call.is_good)])

    def _judge_hangs(self) -> None:
        """Note what hung, and look for parts that were ended though they did not hang."""
        row = self.row
        for fault in self._faults:
            if isinstance(fault, Hang):
                row.hung += fault.hung
                row.noticed_s = max(row.noticed_s, fault.noticed_s)
        ends = num_ended_as_hung(self._deployment.whole_log())
        row.false_alarms = max(0, ends - row.hung.total())
        if row.false_alarms:
            row.problems.append(f"{ends} parts were ended as hung, and {row.hung.total()} hung")

    async def _hurt(self, client: Client, until: float) -> None:
        """Strike at random times; faults of several kinds may last at once."""
        strikes: dict[asyncio.Task[None], Fault] = {}
        weights = [fault.weight for fault in self._faults]
        while time.monotonic() < until:
            (fault,) = self._draw.choices(self._faults, weights)
            if fault.kind == PauseAll.kind:  # others would wake some processes meanwhile
                await asyncio.gather(*strikes)
                await self._strike(fault)
                continue
            lasting = [other for task, other in strikes.items() if not task.done()]
            if fault.kind in OF_PARTS or fault not in lasting:
                strikes[asyncio.create_task(self._strike(fault))] = fault
            await asyncio.sleep(self._draw.expovariate(1 / APART_S))
            if self._rests and self._draw.random() < CALM:
                await self._flow(client)
        await asyncio.gather(*strikes)

    async def _strike(self, fault: Fault) -> None:
        began = wall_clock()
        if fault.kind not in OF_PARTS:  # else each part is noted as it is hurt
            self.recorder.hurt(fault.kind)
        if hurt := await fault.strike(self._draw):
            self.row.faults[fault.kind] += 1
            if fault.kind == Kill.kind:
                self.row.killed[role_of(hurt)] += 1
            self.story.append(f"{began} {fault.kind}, until {wall_clock()}: {hurt}")
        if fault.kind not in OF_PARTS:
            self.recorder.hurt(fault.kind)

    async def _flow(self, client: Client) -> None:
        """Wait until the clients get tokens: else nothing would run that could be hurt."""
        enough, deadline = client.num_tokens + FLOWING, time.monotonic() + BACK_S
        while client.num_tokens < enough:
            assert time.monotonic() < deadline, f"no tokens for {BACK_S} s:\n{self._deployment.log()}"
            await asyncio.sleep(0.05)
