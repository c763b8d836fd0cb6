"""A worker as the router knows it: what it told last, and what it was sent since.

A wait is predicted, and grows shorter as time passes. Room is what the worker told last, less what was sent there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, inf

from alignedserve.core import Role
from alignedserve.protocol.messages import SEEN_S, Backlog, Member, Report
from alignedserve.router.placing.recent import MovingSum

RECENT_S = 3.5  # prompts that a decode worker ran so long ago count half


@dataclass(slots=True, eq=False)
class KnownWorker:
    member: Member
    is_open: bool = True  # whether requests are placed there
    told: Backlog = field(default_factory=Backlog)
    all_s: float = 0.0  # to run its prompts from `at` on, with those that were sent there since
    rt_s: float = 0.0  # to run those of chats
    at: float = 0.0
    free_blocks: int | None = None  # below 0 where many requests were sent there; None: it has told nothing yet
    given_blocks: int = 0  # that documents have, and give to chats
    band: tuple[int, int] | None = None  # the shortest and the longest prefix in its batch
    num_rt: int = 0  # chats that decode
    num_late: int = 0  # ... and whose next token is late
    step_s: float = 0.0  # mean time of its steps
    _steps: float = 0.0  # that it had run at `_counted_at`
    _counted_at: float = 0.0
    helped: MovingSum = field(default_factory=partial(MovingSum, RECENT_S))  # time of prompts sent to a decode worker

    name: str = field(init=False)
    kind: Role = field(init=False)
    decodes: bool = field(init=False)

    def __post_init__(self) -> None:  # read for every request and worker
        self.name, self.kind, self.decodes = self.member.name, self.member.kind, self.member.role is Role.DECODE

    def tell(self, backlog: Backlog, now: float) -> None:
        self.told, self.all_s, self.rt_s, self.at = backlog, backlog.prompts_s, backlog.rt_prompts_s, now

    def report(self, report: Report, now: float) -> None:
        self.free_blocks, self.given_blocks, self.band = report.free_blocks, report.given_blocks, report.band
        self.num_rt, self.num_late = report.num_rt, report.num_late
        self._steps, self._counted_at, self.step_s = self.steps(now), now, report.step_s

    def steps(self, now: float) -> float:
        """Return about how many steps the worker has run: by the mean time of a step that it told last."""
        return self._steps + (max(0.0, now - self._counted_at) / self.step_s if self.step_s else 0.0)

    def wait_s(self, is_first: bool, now: float) -> float:
        """Return the time of the prompts before a new one. `is_first`: only those of chats run before."""
        return max(0.0, self.at + (self.rt_s if is_first else self.all_s) - now)

    def loaded_token_s(self, is_first: bool, now: float) -> float:
        """Return the time of one more prompt token behind and beside what is there.

        A worker that has nothing to run tells nothing: from then on what it saw counts less and less, as there."""
        alone_s = self.told.prompt_token_s
        seen_s = self.told.rt_loaded_token_s if is_first else self.told.loaded_token_s
        idle_s = now - self.at - (self.rt_s if is_first else self.all_s)
        if idle_s <= 0.0 or seen_s == alone_s:
            return seen_s
        return alone_s + (seen_s - alone_s) * exp(-idle_s / SEEN_S)

    def add_prompt(self, seconds: float, is_rt: bool, now: float) -> None:
        """Note that a prompt was sent there, which takes so long."""
        loaded_s, rt_loaded_s = self.loaded_token_s(False, now), self.loaded_token_s(True, now)
        self.told = replace(self.told, loaded_token_s=loaded_s, rt_loaded_token_s=rt_loaded_s)
        all_s, rt_s = self.wait_s(False, now), self.wait_s(True, now)
        self.all_s, self.rt_s, self.at = all_s + seconds, rt_s + seconds * is_rt, now

    @property
    def for_chats(self) -> float:
        """Return the blocks that a chat finds there."""
        return inf if self.free_blocks is None else self.free_blocks + self.given_blocks

    def distance(self, length: int) -> int:
        """Return how far a prompt of this length is from the worker's band."""
        shortest, longest = self.band or (length, length)
        return max(0, shortest - length, length - longest)
