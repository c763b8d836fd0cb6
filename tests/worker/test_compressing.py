"""A worker compresses pages for the pool: beside its steps, once, and nothing for an order that is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from alignedserve.core import StepResult
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.decode_worker.state import handlers as decode_handlers
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.prefill_worker.state import handlers as prefill_handlers
from alignedserve.protocol.commands import Command, RunStep, Send
from alignedserve.protocol.events import MemberJoined, MemberLost, PageCompressed, StepDone
from alignedserve.protocol.form_messages import Compress, Compressed
from alignedserve.protocol.form_orders import CompressPage
from alignedserve.protocol.messages import ROUTER, Prefill
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS, POOL_MEMBER, member, request, said

ORDER = Compress(3, (7, 8), (40, 41))
POOL = POOL_MEMBER.holder
ANSWER = Send("pool-0", Compressed(3, (True, False)))


@pytest.fixture(params=[PrefillCore, decode_core])
def worker(request: pytest.FixtureRequest) -> DecodeCore:
    core: DecodeCore = request.param(WorkerSetup(LIMITS))
    core.handle(MemberJoined(POOL_MEMBER), 0.0)
    return core


def ordered(worker: DecodeCore, order: Compress = ORDER, now: float = 0.0) -> list[Command]:
    return worker.handle(said("pool-0", order), now)


def done(worker: DecodeCore, well: bool = True, number: int = 3, pool: str = POOL) -> list[Command]:
    return worker.handle(PageCompressed(pool, number, well, 0.01), 0.0)


def test_a_page_after_the_other_and_then_the_answer(worker: DecodeCore) -> None:
    assert ordered(worker) == [CompressPage(3, POOL, 7, 40)]
    assert done(worker) == [CompressPage(3, POOL, 8, 41)]
    assert done(worker, well=False) == [ANSWER]


def test_an_order_that_comes_again_is_answered_and_not_done_again(worker: DecodeCore) -> None:
    """The pages of the order may belong to another request by now."""
    ordered(worker)
    assert ordered(worker) == [], "it is at it"
    done(worker)
    done(worker, well=False)
    assert ordered(worker) == [ANSWER]
    assert ordered(worker, Compress(2, (1,), (50,))) == [], "an older one"
    assert ordered(worker, Compress(4, (1,), (50,))) == [CompressPage(4, POOL, 1, 50)]


def test_a_pool_that_comes_back_hears_what_it_did_not(worker: DecodeCore) -> None:
    ordered(worker)
    worker.handle(MemberLost(POOL_MEMBER), 0.0)
    assert done(worker) == [], "there is nobody to say it to"
    assert worker.handle(MemberJoined(POOL_MEMBER), 0.0)[-1:] == [CompressPage(3, POOL, 8, 41)]
    assert done(worker, well=False) == [ANSWER]


def test_another_life_of_the_pool_has_other_orders(worker: DecodeCore) -> None:
    ordered(worker)
    worker.handle(MemberLost(POOL_MEMBER), 0.0)
    following = member("pool-0", 2)
    worker.handle(MemberJoined(following), 0.0)
    first = said("pool-0", Compress(1, (5,), (60,)), incarnation=2)
    assert worker.handle(first, 0.0) == [CompressPage(1, following.holder, 5, 60)]
    assert done(worker, pool=POOL) == [], "of the life before"
    assert done(worker, number=1, pool=following.holder) == [Send("pool-0", Compressed(1, (True,)))]


def test_a_step_that_is_due_comes_first() -> None:
    """A step takes 0.2 s, and a first token is due 0.15 s after the running step will have ended."""
    worker = decode_core(WorkerSetup(LIMITS))
    worker.handle(MemberJoined(POOL_MEMBER), 0.0)
    worker.handle(said(ROUTER, Prefill(request("a"))), 0.0)
    worker.handle(StepDone(StepResult(1, (("a", 0),)), 0.2), 0.2)
    assert any(isinstance(command, RunStep) for command in worker.handle(said(ROUTER, Prefill(request("b"))), 0.65))
    assert ordered(worker, now=0.65) == []
    after = worker.handle(StepDone(StepResult(2, (("b", 0),)), 0.2), 0.85)
    assert CompressPage(3, POOL, 7, 40) in after, "nobody waits for a token any more"


def test_pages_are_compressed_beside_a_step_with_time_to_spare() -> None:
    worker = decode_core(WorkerSetup(LIMITS))
    worker.handle(said(ROUTER, Prefill(request("a"))), 0.0)
    worker.handle(MemberJoined(POOL_MEMBER), 0.0)
    assert ordered(worker) == [CompressPage(3, POOL, 7, 40)]


@pytest.mark.parametrize(
    ("make", "table"), [(PrefillCore, prefill_handlers), (decode_core, decode_handlers)], ids=["prefill", "decode"]
)
def test_forms_hear_first_of_all(
    make: Callable[[WorkerSetup], DecodeCore], table: Callable[[Any], Mapping[object, tuple[object, ...]]]
) -> None:
    """Each line of a core's table says so itself, also where the core hears the same event."""
    core = make(WorkerSetup(LIMITS))
    assert {kind: table(core)[kind][:1] for kind in core.forms.kinds} == dict.fromkeys(core.forms.kinds, (core.forms,))
    assert len(core.forms.kinds) > 3, "the forms of both workers hear something"
