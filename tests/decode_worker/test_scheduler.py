"""A decode worker among requests that come, grow, leave and return in any order, on a device that is far too small.

The pool is the real one, and the engine notices wrong KV (simulator/machines/engine.py): a step whose prefix does not
lie where its plan says, slots that two requests write to, hidden vectors that are missing. So every request that was
preempted, checkpointed, restored, moved, evicted, returned, kept as hidden vectors or recomputed is as it was,
or a test fails. The test also checks after every event that each block is free or has one owner; no request is in
two places; no request waits for nothing; a step is within its limits; each client has its next token and no other.
In the end nothing is held.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from alignedserve.core import (
    Chunk,
    Entry,
    KvForm,
    Request,
    Sampling,
    ServiceClass,
    Slo,
    StepPlan,
    WorkerLimits,
    units_for,
)
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.kvpool.state import PoolCore
from alignedserve.lab.fuzzing.worker_views import blocks_of, num_evictions, num_preemptions, slots_of, weighed
from alignedserve.lab.simulator.machines.engine import CheckedHands, Costs, TaggedArena, TokenStory, story_from
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.commands import Command, CopyOut, RunStep, Send, SetTimer
from alignedserve.protocol.events import Event, MemberJoined, TimerFired
from alignedserve.protocol.extents import Extents
from alignedserve.protocol.form_orders import CopySlots
from alignedserve.protocol.messages import (
    ROUTER,
    Acknowledge,
    AskPages,
    Cancel,
    Commit,
    LeasePages,
    Message,
    Prefill,
    Progress,
    Tokens,
)
from alignedserve.protocol.page_names import chained_hashes
from alignedserve.scheduling.policy import Chunking, Policy, Room
from alignedserve.worker.setup import WorkerSetup
from tests.conftest import SOAK
from tests.rare import thinned
from tests.samples import GATEWAY_MEMBER, POOL_MEMBER, ROUTER_MEMBER, member, request, said, slot_copies

LIMITS = WorkerLimits(num_blocks=7, block_size=4, page_size=8, max_step_tokens=12, max_batch=4)
MOST_PROMPT, MOST_OUTPUT = 12, 14  # in tokens: a prompt and an output together are less than the device holds
PAGES = 40
DECODE, PREFILL = member("decode-0"), member("prefill-0")
TURNS = Policy(SchedulerName.ROUND_ROBIN, Chunking.FIXED)
POLICIES = {
    "default": Policy(),
    "bidirectional": Policy(memory="two_ended"),
    "few places": Policy(memory="two_ended:0.2"),
    "hybrid": Policy(memory="hybrid"),
    "recompute": Policy(evict=False),
    "chunks": Policy(room=Room.CHUNKS),
    "whole": Policy(room=Room.WHOLE),
    "round robin": TURNS,
    "mlfq": replace(TURNS, scheduler=SchedulerName.MLFQ),
    "knapsack": replace(TURNS, scheduler=SchedulerName.APT_SERVE, chunking=Chunking.NONE, memory="hybrid"),
}
REACHED = {  # what a run with this policy must have reached
    "default": ("preempted", "evicted"),
    "bidirectional": ("checkpoint", "restored"),
    "few places": ("checkpoint", "restored", "preempted"),
    "hybrid": ("hidden", "projected", "preempted"),
    "recompute": ("preempted",),
    "chunks": ("preempted",),
    "round robin": ("preempted",),
    "mlfq": ("preempted",),
    "knapsack": ("hidden", "preempted"),
}
AHEAD = ("default", "whole", "mlfq")  # policies that also run with steps planned while the step before runs
reached: Counter[str] = Counter()


@dataclass
class Client:
    request: Request
    story: TokenStory
    tokens: list[int]
    is_open: bool = True


class Scheduling(RuleBasedStateMachine):
    policy = POLICIES["default"]
    look_ahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.clients: dict[str, Client] = {}
        self.stories: dict[str, TokenStory] = {}
        self.arena = TaggedArena(LIMITS.page_size, Extents(PAGES))
        self.core, self.pool = (
            decode_core(WorkerSetup(LIMITS, self.policy, look_ahead=self.look_ahead)),
            PoolCore(PAGES, LIMITS.block_size, self.policy),
        )
        self.hands = self._hands(LIMITS.num_blocks)
        self.work, self.mail = deque[Command](), deque[tuple[str, Event]]()
        self.timers: dict[tuple[str, str], float] = {}
        # Requests whose pages are asked for, and whether each is pinned.
        self.prefilled: dict[ServiceClass, tuple[str, bool]] = {}
        self.num_asks = 0
        self.slot_copies = Counter[str]()
        self.now = 0.0
        for neighbour in (DECODE, PREFILL, ROUTER_MEMBER, GATEWAY_MEMBER):
            self.tell(POOL_MEMBER.name, MemberJoined(neighbour))
        for neighbour in (POOL_MEMBER, ROUTER_MEMBER, GATEWAY_MEMBER):
            self.tell(DECODE.name, MemberJoined(neighbour))

    def _hands(self, num_blocks: int) -> CheckedHands:
        hands = CheckedHands(self.stories, Costs(), replace(LIMITS, num_blocks=num_blocks), lambda _: self.arena)
        hands.meet(POOL_MEMBER)
        return hands

    # --- Messages

    def tell(self, to: str, event: Event) -> None:
        self.mail.append((to, event))
        while self.mail:
            to, event = self.mail.popleft()
            core = self.core if to == DECODE.name else self.pool
            for command in core.handle(event, self.now):
                self._perform(to, command)

    def _perform(self, by: str, command: Command) -> None:
        match command:
            case Send(to, message) if to in (DECODE.name, POOL_MEMBER.name):
                self.mail.append((to, said(by, message)))
            case Send(to, LeasePages(pages)) if to == PREFILL.name:
                self._commit(next(iter(self.prefilled), ServiceClass.RT), pages)
            case Send(message=Tokens() as tokens):
                self._delivered(tokens)
            case Send(message=Progress(lost=lost, unknown=unknown)):
                assert not lost, "without a fault nothing is lost"
                assert not unknown
            case SetTimer(name, at):
                self.timers[by, name] = at
            case Send():
                pass
            case _:
                if isinstance(command, RunStep):
                    self._check_limits(command.plan)
                if isinstance(command, CopySlots):
                    self.slot_copies += slot_copies(command)
                self.work.append(command)

    def say(self, sender: str, message: Message, to: str = DECODE.name) -> None:
        self.tell(to, said(sender, message))

    def _delivered(self, tokens: Tokens) -> None:
        for output in tokens.outputs:
            client = self.clients[output.request]
            if not client.is_open:
                continue
            assert output.index == len(client.tokens), "each token comes once, in its turn"
            client.tokens += output.tokens
            assert client.tokens == [*client.story.output[: len(client.tokens)]]
            assert (output.finish is not None) == (len(client.tokens) == len(client.story.output))
            if output.finish is not None:
                client.is_open = False
                self.mail.append((DECODE.name, said(GATEWAY_MEMBER.name, Acknowledge((output.request,)))))

    def _check_limits(self, plan: StepPlan) -> None:
        assert len(plan.decodes) + len(plan.chunks) <= LIMITS.max_batch
        assert 0 < plan.num_tokens <= LIMITS.max_step_tokens
        names = [part.request for part in plan.parts]
        assert len(names) == len(set(names))

    # --- Arrivals

    def _client(self, is_rt: bool, prompt: int, output: int, priority: int) -> Request:
        number = len(self.clients)
        slo = Slo(ttft_s=1.0, tbt_s=0.2) if is_rt else Slo(jct_s=100.0)
        new_request = replace(
            request(f"r{number}", prompt, MOST_OUTPUT),
            prompt=tuple(range(1 + number, 1 + number + prompt)),
            service=ServiceClass.RT if is_rt else ServiceClass.BE,
            slo=slo,
            arrival_at=self.now,
            priority=priority,
            sampling=Sampling(seed=number),
        )
        self.stories[new_request.id] = story = story_from(new_request, output)
        self.clients[new_request.id] = Client(new_request, story, [])
        return new_request

    @rule(
        is_rt=st.booleans(),
        prompt=st.integers(1, MOST_PROMPT),
        output=st.integers(1, MOST_OUTPUT),
        priority=st.integers(0, 1),
    )
    def a_prompt_comes(self, is_rt: bool, prompt: int, output: int, priority: int) -> None:
        self.say(ROUTER, Prefill(self._client(is_rt, prompt, output, priority)))

    @rule(
        is_rt=st.booleans(),
        is_pinned=st.booleans(),
        prompt=st.integers(1, MOST_PROMPT),
        output=st.integers(2, MOST_OUTPUT),
    )
    def one_is_prefilled_elsewhere(self, is_rt: bool, is_pinned: bool, prompt: int, output: int) -> None:
        """Send a prefilled request's KV to the pool as soon as the pool has pages for it."""
        service = ServiceClass.RT if is_rt else ServiceClass.BE
        if self.prefilled:
            return
        submitted = self._client(is_rt, prompt, output, 0)
        self.prefilled[service] = (submitted.id, is_pinned and is_rt)
        self.num_asks += 1
        self.say(
            PREFILL.name,
            AskPages(units_for(prompt, LIMITS.page_size), self.num_asks),
            POOL_MEMBER.name,
        )

    def _commit(self, service: ServiceClass, pages: tuple[int, ...]) -> None:
        if not pages or service not in self.prefilled:
            return
        name, is_pinned = self.prefilled.pop(service)
        client = self.clients[name]
        prompt, first = client.request.prompt, client.story.output[0]
        if client.is_open:
            client.tokens.append(first)
        hands, blocks = self._hands(4), tuple(range(units_for(len(prompt), LIMITS.block_size)))
        for work in (
            RunStep(StepPlan(1, (Chunk(name, prompt, 0, KvForm(blocks), client.request.sampling),), ())),
            CopyOut(1, POOL_MEMBER.holder, blocks, pages, prompt),
        ):
            hands.begin(work)
            hands.finish(work, 0.0)
        full = len(prompt) // LIMITS.page_size * LIMITS.page_size
        entry = Entry(client.request, (first,), pages, names=chained_hashes(prompt[:full], LIMITS.page_size))
        commit = Commit(entry, to=DECODE.name if is_pinned else "")
        self.mail.append((POOL_MEMBER.name, said(PREFILL.name, commit)))

    @rule(data=st.data())
    def a_client_goes(self, data: st.DataObject) -> None:
        if names := [name for name, client in self.clients.items() if client.is_open]:
            name = data.draw(st.sampled_from(names))
            self.clients[name].is_open = False
            for part in (POOL_MEMBER.name, DECODE.name):
                self.say(ROUTER, Cancel(name, 0), part)

    # --- Progress

    @rule(most=st.integers(1, 12))
    def work_goes_on(self, most: int) -> None:
        for _ in range(most):
            if not self.work:
                return
            work = self.work.popleft()
            self.now += (seconds := self.hands.begin(work))
            if (event := self.hands.finish(work, seconds)) is not None:
                self.tell(DECODE.name, event)

    @rule(seconds=st.sampled_from((0.01, 0.3, 6.0, 30.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for (part, name), at in sorted(self.timers.items()):
            if at <= self.now:
                del self.timers[part, name]
                self.tell(part, TimerFired(name))

    # --- Invariants

    @invariant()
    def each_block_has_one_owner(self) -> None:
        assert sorted(blocks_of(self.core)) == list(range(LIMITS.num_blocks))
        if (shared := slots_of(self.core.memory)) is not None:
            counts = [shared.num_left(block) + shared.num_right(block) for block in shared.left]
            assert max(counts, default=0) <= LIMITS.block_size

    @invariant()
    def no_request_is_in_two_places(self) -> None:
        assert len(held := self.core.here.attempts()) == len(set(held))
        assert sorted(self.pool.pages.numbers) == sorted(self.pool.pages.all_numbers)

    @invariant()
    def no_request_waits_for_nothing(self) -> None:
        """Check that a step is never empty while any request can run, and that no request waits for finished work."""
        if not self.work:
            assert not self.core.here.attempts(), "a worker that has nothing to do has nobody who waits"

    def teardown(self) -> None:
        for _ in range(400):
            if not (self.work or any(client.is_open for client in self.clients.values())):
                break
            self.work_goes_on(50)
            if not self.work:
                self.time_passes(6.0)
        assert not [name for name, client in self.clients.items() if client.is_open]
        self.each_block_has_one_owner()
        assert {what: held for what, held in self.core.held.items() if held} == {}
        assert not self.pool.kept
        self._note()

    def _note(self) -> None:
        core, counts = self.core, Counter[str]()
        counts["preempted"], counts["evicted"] = num_preemptions(core), num_evictions(core)
        counts["ahead"] = core.stepping.num_ahead_steps
        counts += self.slot_copies
        if (hybrid := weighed(core.memory)) is not None:
            counts["hidden"], counts["projected"] = hybrid.num_hidden, hybrid.num_projected
        reached.update(counts)


@pytest.mark.parametrize(
    ("name", "look_ahead"), thinned([*((name, 0) for name in POLICIES), *((name, 1) for name in AHEAD)], usual=3)
)
def test_whatever_comes_all_holds(name: str, look_ahead: int) -> None:
    of = {"policy": POLICIES[name], "look_ahead": look_ahead}
    machine = type(f"Scheduling_{name.replace(' ', '_')}_{look_ahead}", (Scheduling,), of)
    reached.clear()
    examples, steps = (300, 80) if SOAK else (6, 50)
    form = settings(max_examples=examples, stateful_step_count=steps)
    run_state_machine_as_test(machine, settings=form)
    wanted = (*REACHED.get(name, ()), *(["ahead"] if look_ahead else []))
    assert {what for what in wanted if not reached[what]} == set()
