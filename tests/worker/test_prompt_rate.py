"""A worker tells the router how long its prompts will take: as long as prompts that had to wait took lately."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import Request, ServiceClass, StepPlan, StepResult
from alignedserve.cost.fit import Point
from alignedserve.cost.model import Shape
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, RunStep, Send
from alignedserve.protocol.events import MemberJoined, StepDone
from alignedserve.protocol.messages import ROUTER, Backlog, LeasePages, Prefill, Progress
from alignedserve.scheduling.policy import Chunking, Policy
from alignedserve.worker.setup import WorkerSetup
from tests.cost.fitted import cost_of
from tests.samples import LIMITS, POOL_MEMBER, ROUTER_MEMBER, request, said

TOKEN_S = 0.001  # by the cost model
STEP = 8  # prompt tokens of a step
SHAPES = [
    Shape.build([(tokens, prefix)], prefixes=[8] * decodes)
    for tokens in (1, 2, 4, 8)
    for prefix in (0, 8, 64)
    for decodes in (0, 1)
]


class Machine:
    """A worker without a pool and what it told; each step takes as long as a test says."""

    def __init__(
        self, num_blocks: int = 1000, max_batch: int = 8, tells_seconds: bool = False, reuse: bool = False
    ) -> None:
        """The cost model learns from steps that tell how long they took."""
        costs = cost_of([Point(shape, TOKEN_S * shape.tokens) for shape in SHAPES])
        limits = replace(LIMITS, num_blocks=num_blocks, max_step_tokens=STEP, max_batch=max_batch)
        self._core = decode_core(WorkerSetup(limits, Policy(chunking=Chunking.FIXED, reuse=reuse), costs))
        self._tells_seconds = tells_seconds
        self._plan: StepPlan | None = None
        self._prompts = dict[str, int]()  # request -> prompt tokens that have not run
        self.now, self.told = 0.0, list[Backlog]()
        self._core.handle(MemberJoined(ROUTER_MEMBER), 0.0)

    def come(self, *some: Request) -> None:
        for new_request in some:
            self._prompts[new_request.id] = len(new_request.prompt)
            self._do(self._core.handle(said(ROUTER, Prefill(new_request)), self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def end_step(self, seconds: float) -> None:
        """Let the step end after so many more seconds; each prompt that is through has its only token."""
        assert self._plan is not None
        plan, self._plan = self._plan, None
        self.now += seconds
        for chunk in plan.chunks:
            self._prompts[chunk.request] -= len(chunk.tokens)
        through = [chunk.request for chunk in plan.chunks if not self._prompts[chunk.request]]
        others = (part.request for part in (*plan.decodes, *plan.draws))
        tokens = [(name, 7) for name in (*through, *others)]
        told_s = seconds if self._tells_seconds else 0.0
        self._do(self._core.handle(StepDone(StepResult(plan.number, tuple(tokens)), told_s), self.now))

    def run_all(self, seconds: float) -> None:
        while self._plan is not None:
            self.end_step(seconds)

    @property
    def draws(self) -> int:
        return 0 if self._plan is None else len(self._plan.draws)

    @property
    def backlog(self) -> Backlog:
        return self.told[-1]

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, RunStep):
                self._plan = command.plan
            if isinstance(command, Send) and isinstance(command.message, Progress):
                self.told.append(command.message.backlog)


def chat(name: str, prompt: int, max_tokens: int = 1) -> Request:
    return request(name, prompt=prompt, max_tokens=max_tokens)


def document(name: str, prompt: int) -> Request:
    return replace(chat(name, prompt), service=ServiceClass.BE)


def slow(num_steps: int = 40) -> Machine:
    """Return a worker whose prompts waited during so many steps, which took 0.1 s instead of 0.008 s."""
    machine = Machine()
    machine.come(chat("long", prompt=STEP * num_steps))
    machine.run_all(0.1)
    return machine


def test_while_nothing_waits_the_cost_model_is_believed() -> None:
    machine = Machine()
    for number in range(10):
        machine.come(chat(f"{number}", prompt=STEP))
        machine.end_step(1.0)
        machine.pass_time(1.0)
    backlog = machine.backlog
    assert backlog.prompt_token_s == pytest.approx(TOKEN_S, rel=0.2)
    assert backlog.loaded_token_s == backlog.rt_loaded_token_s == pytest.approx(backlog.prompt_token_s)


def test_while_prompts_wait_the_time_rises_to_what_is_seen() -> None:
    machine = slow()
    *seen, last = [backlog.loaded_token_s for backlog in machine.told]
    assert seen == sorted(seen)
    assert last == pytest.approx(0.1 / STEP, rel=0.15)
    assert machine.backlog.prompt_token_s == pytest.approx(TOKEN_S, rel=0.2), "what a prompt takes alone is the same"


def test_what_waits_takes_so_long_each_token() -> None:
    machine = Machine()
    machine.come(chat("long", prompt=40 * STEP))
    machine.run_all(0.1)
    tokens = [backlog.prompts_s / backlog.loaded_token_s for backlog in machine.told]
    assert tokens == pytest.approx([STEP * round(left / STEP) for left in tokens])
    assert tokens == sorted(tokens, reverse=True)
    assert (len(set(tokens)) > 10, tokens[-1]) == (True, 0.0)
    assert all(backlog.prompts_s == backlog.rt_prompts_s for backlog in machine.told)


@pytest.mark.parametrize(("seconds", "share"), [(0.5, 0.7), (30.0, 0.0)])
def test_some_seconds_later_the_cost_model_is_believed_again(seconds: float, share: float) -> None:
    """`share` is what is left of what was seen."""
    machine = slow()
    machine.pass_time(seconds)
    machine.come(chat("next", prompt=STEP))
    machine.end_step(0.1)
    backlog = machine.backlog
    if share:
        assert backlog.loaded_token_s > share * 0.1 / STEP
    else:
        assert backlog.loaded_token_s == pytest.approx(backlog.prompt_token_s, rel=0.1)


def test_choices_that_get_their_tokens_with_the_first_one_did_not_wait() -> None:
    """The first one runs two tokens beside a decode: such a step says nothing of the time of a token."""
    machine = Machine(tells_seconds=True, reuse=True)
    asked = request("c", prompt=2, max_tokens=2)
    machine.come(chat("beside", prompt=1, max_tokens=100))
    machine.come(*(replace(asked, id=f"c{at}", sampling=replace(asked.sampling, seed=at)) for at in range(4)))
    machine.end_step(0.1)
    assert machine.draws == 3
    machine.end_step(0.1)
    machine.end_step(0.1)
    assert machine.backlog.rt_loaded_token_s == pytest.approx(machine.backlog.prompt_token_s)
    assert machine.backlog.loaded_token_s == pytest.approx(machine.backlog.prompt_token_s)


def test_a_prompt_that_came_during_the_step_did_not_wait() -> None:
    machine = Machine()
    machine.come(chat("first", prompt=STEP))
    for number in range(10):
        machine.pass_time(0.5)
        machine.come(chat(f"{number}", prompt=STEP))
        machine.end_step(0.5)
        assert machine.backlog.loaded_token_s == pytest.approx(machine.backlog.prompt_token_s)


def test_a_prompt_that_the_next_step_leaves_out_waits() -> None:
    machine = Machine()
    machine.come(chat("first", prompt=STEP), *(chat(f"{number}", prompt=STEP) for number in range(3)))
    machine.end_step(1.0)
    assert machine.backlog.loaded_token_s == pytest.approx(machine.backlog.prompt_token_s)
    machine.end_step(1.0)
    machine.end_step(1.0)
    assert machine.backlog.loaded_token_s > 10 * machine.backlog.prompt_token_s


def test_the_tokens_of_the_step_that_ends_a_wait_count() -> None:
    """Each prompt waits for one step of a decode, and then runs whole. Chats were refused: the steps counted in which
    no prompt ran, and those did not that ran all of them."""
    machine = Machine(max_batch=1, tells_seconds=True)
    machine.come(chat("0", prompt=STEP, max_tokens=2))
    for number in range(1, 100):
        machine.come(chat(f"{number}", prompt=STEP, max_tokens=2))
        machine.end_step(TOKEN_S * STEP)  # the prompt before it
        machine.end_step(0.03)  # the decode that it waits for
    backlog = machine.backlog
    assert 2 * backlog.prompt_token_s < backlog.loaded_token_s < 1.15 * (0.03 / STEP + TOKEN_S)


def test_documents_that_wait_are_no_wait_of_chats() -> None:
    machine = Machine()
    machine.come(document("long", prompt=40 * STEP))
    machine.run_all(0.1)
    backlog = machine.backlog
    assert backlog.loaded_token_s == pytest.approx(0.1 / STEP, rel=0.15)
    assert backlog.rt_loaded_token_s == pytest.approx(backlog.prompt_token_s)
    assert backlog.rt_prompts_s == 0.0


def test_a_prompt_that_waits_for_memory_makes_no_prompt_seem_slow() -> None:
    """A prompt waits two seconds for memory while a decode runs, and the worker does not take the prompt for slow."""
    machine = Machine(num_blocks=10)
    machine.come(chat("decodes", prompt=8, max_tokens=28))
    machine.end_step(0.01)
    machine.come(chat("waits", prompt=36))
    for _ in range(20):
        machine.end_step(0.1)
    assert all(told.loaded_token_s == pytest.approx(told.prompt_token_s) for told in machine.told)


def test_a_prompt_that_comes_during_a_step_has_not_waited_for_it() -> None:
    """A prefill worker asks the pool about it first. Chats that came beside documents were refused for that."""
    core = PrefillCore(WorkerSetup(replace(LIMITS, num_blocks=1000, max_step_tokens=STEP)))
    for neighbour in (ROUTER_MEMBER, POOL_MEMBER):
        core.handle(MemberJoined(neighbour), 0.0)
    document = replace(request("document", prompt=6), service=ServiceClass.BE)
    core.handle(said(ROUTER, Prefill(document)), 0.0)
    core.handle(said("pool-0", LeasePages((1,), 1)), 0.0)
    core.handle(said(ROUTER, Prefill(request("chat", prompt=20))), 9.9)
    ended = core.handle(StepDone(StepResult(1, (("document", 7),)), seconds=10.0), 10.0)
    (told,) = [command.message for command in ended if isinstance(command, Send) and command.to == ROUTER]
    assert isinstance(told, Progress)
    assert told.backlog.rt_loaded_token_s == told.backlog.prompt_token_s
