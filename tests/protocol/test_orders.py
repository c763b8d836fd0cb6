"""Orders of rank 0 reach the other ranks unchanged."""

from __future__ import annotations

import pytest
from msgspec import msgpack

from alignedserve.core import (
    Choice,
    Chunk,
    Decode,
    FoldKv,
    History,
    KvForm,
    Role,
    Sampling,
    Scoring,
    StepPlan,
)
from alignedserve.errors import WireError
from alignedserve.protocol.commands import (
    CopyIn,
    CopyOut,
    ReceiveKv,
    RunStep,
    SendKv,
)
from alignedserve.protocol.events import KvReceived, KvSent
from alignedserve.protocol.form_orders import CompressPage, CopySlots, ProjectKv
from alignedserve.protocol.messages import Member
from alignedserve.protocol.rank_orders import (
    Ended,
    Meet,
    Order,
    PartFrom,
    decode,
    decode_ended,
    without_histories,
)
from alignedserve.protocol.wire import pack

POOL = Member("pool-0", Role.POOL, "local", 7, "tcp://127.0.0.1:1")
SAMPLING = Sampling(temperature=0.5, seed=2**40, logit_bias=((3, -1.5),), grammar=Choice(((1, 2),)), logprobs=2)
PLAN = StepPlan(
    5,
    (
        Chunk("a", (1, 2, 3), 4, KvForm((9, 8)), SAMPLING, 2, None, Scoring((2, 3), 1)),
        Chunk("b", (4,), 0, KvForm((3,), form="hidden", in_place=2), None),
    ),
    (Decode("c", 7, 30, KvForm((1, ~2), 4, 8), Sampling(), 4),),
    0.25,
)


@pytest.mark.parametrize(
    "order",
    [
        RunStep(PLAN),
        CopyOut(1, "pool-0.7", (1,), (2, 3), (5, 6), 0, True),
        CopyIn(2, "pool-0.7", (1,), (2,), (3,), 0, True),
        CopySlots(((1, 2),), ((3, 4),), ((5, 6),), 1, ((0, 4),)),
        FoldKv(((7, 1, 2), (8, 3, 4))),
        ProjectKv("r", (2, 3), (1, 4), 17),
        CompressPage(1, "pool-0.7", 2, 3),
        SendKv(1, "decode-0.7", (1, 2), (3, 4, 5)),
        ReceiveKv(1, "prefill-0.7", (1, 2), (3, 4, 5)),
        Meet(POOL),
        PartFrom(POOL),
    ],
    ids=lambda order: type(order).__name__,
)
def test_an_order_arrives_as_it_was_given(order: Order) -> None:
    assert decode(pack(order)) == order


@pytest.mark.parametrize("ended", [KvSent(3, "decode-0.7", ok=False), KvReceived(4, "prefill-0.7", intact=True)])
def test_how_a_transfer_ended_arrives_too(ended: Ended) -> None:
    assert decode_ended(pack(ended)) == ended
    with pytest.raises(WireError):
        decode_ended(pack(Meet(POOL)))


def test_histories_stay_with_rank_0_which_alone_samples() -> None:
    history = History((1,), [2, 3], (0,))
    plan = StepPlan(
        1,
        (Chunk("a", (1,), 0, KvForm((0,)), SAMPLING, history=history),),
        (Decode("b", 1, 1, KvForm((1,)), SAMPLING, 1),),
    )
    assert without_histories(plan).chunks == (Chunk("a", (1,), 0, KvForm((0,)), SAMPLING),)
    assert without_histories(plan).decodes == plan.decodes


@pytest.mark.parametrize("frame", [b"", b"\xc1", msgpack.encode(("Send", ())), msgpack.encode(("Meet", (1,)))])
def test_what_is_no_order_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame)
