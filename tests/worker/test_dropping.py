"""Tests of what a request drops where all layers have windows: never what is read, and all else but a page."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import Chunk, Decode, KvForm, Sampling, ServiceClass, Slo, StepResult, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.lab.fuzzing.worker_views import blocks_of
from alignedserve.papers.names import SchedulerName
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import CopyOut, RunStep, Send
from alignedserve.protocol.events import CopiedOut, MemberJoined, StepDone
from alignedserve.protocol.messages import ROUTER, Commit, Prefill
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import Chunking, Policy, Room
from alignedserve.worker.pool import PageWriter
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.blocks import NamedBlocks
from alignedserve.worker.step.request import WorkerRequest
from tests.prefill_worker.asks import leased
from tests.samples import LIMITS, POOL_MEMBER, request, said


@given(st.integers(0, 500), st.integers(2, 100), st.sampled_from((4, 8, 64)))
def test_a_request_holds_its_window_and_less_than_a_page_more(tokens: int, reach: int, page_size: int) -> None:
    limits = WorkerLimits(10, 4, page_size, max_step_tokens=8, max_batch=2, reach=reach)
    unread, first_read = limits.unread(tokens), max(0, tokens + 1 - reach)
    assert unread <= first_read < unread + page_size
    assert unread % page_size == 0
    assert tokens + 1 - unread <= limits.least_held(tokens + 1)


def test_a_request_that_reads_all_drops_nothing() -> None:
    assert LIMITS.unread(10_000) == 0
    assert LIMITS.least_held(10_000) == 10_000


def test_a_step_is_known_by_its_blocks_after_some_were_dropped() -> None:
    asked = request("a", max_tokens=50)
    here = WorkerRequest(asked, promise(asked, Policy()), [7], KvForm((3, 4), 8), 20)
    planned = Decode("a", 1, 19, KvForm((1, 2, 3)), Sampling(), 0)
    assert here.is_at(planned)
    assert not here.is_at(replace(planned, kv=KvForm((1, 2, 5))))
    assert not here.is_at(replace(planned, kv=KvForm((3, 1, 2))))
    assert here.is_at(Chunk("a", (1,), 19, KvForm((3, 4), 8), None))


def test_pages_after_those_that_were_dropped_are_found_as_long_as_all_are_here() -> None:
    store = NamedBlocks(4)
    blocks = store.take(3)
    assert blocks is not None
    store.publish((10, 11, 12), blocks)
    store.give(blocks[:2])
    more = store.take(1)
    assert more is not None
    store.publish((10, 11, 12, 13), (blocks[2], *more), num_dropped=2)
    assert store.find((10, 11, 12, 13, 14)) == 4
    assert store.take(2) is not None, "idle pages go"
    assert store.find((10, 11, 12, 13)) == 0
    store.publish((10, 11, 12, 13), (blocks[2], *more), num_dropped=2)
    assert store.find((10, 11, 12, 13)) == 0, "nothing is found without its beginning"


@pytest.mark.parametrize(
    "policy",
    [
        Policy(room=Room.WHOLE),
        Policy(memory="two_ended"),
        Policy(memory="hybrid"),
        Policy(chunking=Chunking.NONE),
        Policy(SchedulerName.FCFS, chunking=Chunking.FIXED),
    ],
)
def test_by_some_policies_requests_keep_all(policy: Policy) -> None:
    assert policy.problem is None
    assert not policy.drops
    with pytest.raises(AssertionError, match="keep all"):
        WorkerSetup(replace(LIMITS, reach=4), policy)


def test_by_others_they_drop_what_no_layer_reads() -> None:
    assert Policy().drops
    assert Policy(SchedulerName.FCFS, Chunking.FIXED, Room.CHUNKS).drops


def test_a_prompt_that_leaves_for_a_chat_takes_no_more_blocks_in_that_step() -> None:
    """It gets blocks chunk by chunk: those of its next chunk were lost with it (fuzz seed 84003190)."""
    limits = WorkerLimits(14, 2, page_size=8, max_step_tokens=64, max_batch=3, reach=20)
    worker = decode_core(WorkerSetup(limits, Policy()))
    document = replace(request("document", 35, 1), service=ServiceClass.BE, slo=Slo(jct_s=1e5))
    commands = worker.handle(said(ROUTER, Prefill(document)), 0.0)
    [began] = [command.plan for command in commands if isinstance(command, RunStep)]
    assert len(began.chunks[0].tokens) == 28, "there is memory for so many"
    worker.handle(said(ROUTER, Prefill(request("chat", 10, 1))), 0.0)
    commands = worker.handle(StepDone(StepResult(began.number, ()), 0.01), 0.01)
    [began] = [command.plan for command in commands if isinstance(command, RunStep)]
    assert [chunk.request for chunk in began.chunks] == ["chat"]
    assert sorted(blocks_of(worker)) == list(range(14))


def test_a_prompt_goes_to_the_pool_without_its_beginning() -> None:
    worker = PrefillCore(WorkerSetup(replace(LIMITS, num_blocks=16, reach=8), Policy(reuse=False)))
    worker.handle(MemberJoined(POOL_MEMBER), 0.0)
    worker.handle(said(ROUTER, Prefill(request("a", prompt=32))), 0.0)
    worker.handle(said("pool-0", leased((5, 6), 1)), 0.0)
    for number in (1, 2, 3, 4):
        commands = worker.handle(StepDone(StepResult(number, (("a", 7),) if number == 4 else ())), 0.0)
    [copy] = [command for command in commands if isinstance(command, CopyOut)]
    assert (len(copy.pages), copy.tokens) == (1, tuple(range(25, 33)))
    [commit] = [
        command.message
        for command in worker.handle(CopiedOut(copy.number), 0.0)
        if isinstance(command, Send) and isinstance(command.message, Commit)
    ]
    assert (commit.entry.pages, commit.entry.dropped) == (copy.pages, 24)
    assert not any(worker.held.values())


def test_what_is_written_in_vain_keeps_no_blocks() -> None:
    """A document that had left while its prompt was being written was recomputed. It kept all its blocks for as long
    as that writing took, and then nothing ran that would have freed them (fuzz seed 91000316)."""
    writer, asked = PageWriter(LIMITS.page_size, LIMITS.block_size), request("document", 20, max_tokens=50)
    writer.lease.ask_for_spare(2, ())
    writer.lease.take_answer(leased((5, 6), 1))
    here = WorkerRequest(asked, promise(asked, Policy()), [], KvForm((0, 1, 2, 3, 4)), 20)
    writer.begin(here, POOL_MEMBER, 2 * LIMITS.page_size, aside=True)
    assert writer.is_writing(here)
    writer.forget_parts(here)
    assert not writer.is_writing(here)
    assert sorted(writer.leased) == [5, 6], "the pages are not free before that has ended"
