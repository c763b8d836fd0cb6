"""Every message passes through the wire unchanged, and nothing else passes."""

from __future__ import annotations

import math
import re
import types
import typing
from dataclasses import is_dataclass, replace
from enum import Enum
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec import Struct, msgpack

from alignedserve.core import (
    Choice,
    Entry,
    Estimate,
    FinishReason,
    Logprob,
    Opening,
    PooledTask,
    Pooling,
    Reasoning,
    Rejection,
    Request,
    Role,
    Sampling,
    ServiceClass,
    Slo,
)
from alignedserve.errors import WireError
from alignedserve.protocol import messages
from alignedserve.protocol.events import Received, attempts_of
from alignedserve.protocol.messages import Commit, Heartbeat, Member, Output, Refused, Tokens
from alignedserve.protocol.wire import MOST_NAMED, VERSION, Envelope, attempts_in, decode, encode
from tests.conftest import examples

KINDS: list[type] = list(typing.get_args(messages.Message))
MOST_BYTES = 1 << 20
ASK = (1, 0, (), False)  # the fields of an AskPages
WHOLE = st.integers(-(2**63), 2**64 - 1)  # whole numbers that msgpack holds
FLOATS = st.floats(allow_nan=False)
FINITE, COUNTS = st.floats(-1e300, 1e300), st.integers(0, 2**63)
CHOICES = st.lists(st.lists(WHOLE, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple)


def sampled(limit: Choice | str | None, **given: Any) -> Sampling:
    return Sampling(syntax=limit, **given) if isinstance(limit, str) else Sampling(grammar=limit, **given)


TOKEN_LISTS = st.lists(COUNTS, max_size=3).map(tuple)
REASONINGS = st.builds(
    Reasoning,
    family=st.text(max_size=12),
    inside=st.booleans(),
    opening=TOKEN_LISTS,
    closing=st.lists(COUNTS, min_size=1, max_size=3).map(tuple),
    most_tokens=st.one_of(st.none(), COUNTS),
    calls=st.booleans(),
)
SAMPLINGS = st.builds(
    sampled,
    temperature=st.floats(0, 1e300),
    top_k=COUNTS,
    top_p=st.floats(0, 1, exclude_min=True),
    seed=WHOLE,
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(1e-300, 1e300),
    presence_penalty=FINITE,
    frequency_penalty=FINITE,
    min_tokens=COUNTS,
    logit_bias=st.lists(st.tuples(COUNTS, FINITE), max_size=3).map(tuple),
    allowed_tokens=st.binary(max_size=5),
    limit=st.one_of(st.none(), st.builds(Choice, CHOICES), st.text(max_size=12)),
    reasoning=st.one_of(st.none(), REASONINGS),
    logprobs=st.one_of(st.none(), COUNTS),
    prompt_logprobs=st.one_of(st.none(), COUNTS),
)
ESTIMATES = st.tuples(st.integers(1, 999), st.integers(0, 999)).map(lambda both: Estimate(both[0], sum(both)))
POOLINGS = st.builds(
    Pooling,
    task=st.sampled_from(PooledTask),
    is_whole=st.booleans(),
    dimensions=st.one_of(st.none(), st.integers(1, 999)),
    second_at=st.one_of(st.none(), COUNTS),
)
quick = settings(deadline=None, max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])


def is_record(kind: Any) -> bool:
    return is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, (tuple, Struct)))


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for all values of a type hint."""
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: WHOLE,
        float: FLOATS,
        str: st.text(max_size=12),
        bool: st.booleans(),
        bytes: st.binary(max_size=9),
        Sampling: SAMPLINGS,
        Estimate: ESTIMATES,
        Pooling: POOLINGS,
    }
    if kind in simple:
        return simple[kind]
    if is_record(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: values_of(hint) for name, hint in hints.items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, args))
    assert origin in (typing.Union, types.UnionType), f"no values of {kind}"
    return st.one_of([st.none() if arg is type(None) else values_of(arg) for arg in args])


ENVELOPES = {kind: st.builds(Envelope, st.text(max_size=12), WHOLE, WHOLE, values_of(kind)) for kind in KINDS}
ANY_ENVELOPE = st.one_of(list(ENVELOPES.values()))

REQUEST = Request(
    id="r1",
    owner="gateway0",
    attempt=2,
    prompt=(1, 200, 70_000),
    emitted=(5,),
    sampling=Sampling(0.5, 40, 0.9, -7),
    max_tokens=16,
    stop_tokens=(2,),
    service=ServiceClass.BE,
    slo=Slo(1.0, 0.25, 60.0),
    arrival_at=12.5,
    priority=-3,
)
COMMIT = Envelope("prefill0", 1_700_000_000_000_000_000, 3, Commit(Entry(REQUEST, (5, 9), (4, 0))))
SCORED = Output("s", 1, 0, (7,), None, (Logprob(-0.5, ((7, -0.5),)),), Opening((Logprob(-1.5),)))
TOKENS = Envelope("decode0", 5, 1, Tokens((Output("r1", 1, 0, (7, 8), FinishReason.STOP), SCORED)))


def refused(frame: bytes, most_bytes: int = MOST_BYTES) -> str:
    with pytest.raises(WireError) as error:
        decode(frame, most_bytes)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 300, "it goes to the log, whoever sent it"
    return message


def packed(*values: Any) -> bytes:
    return bytes(msgpack.encode(values))


def with_fields(kind: str, *values: Any) -> bytes:
    return packed(VERSION, "x", 1, 1, kind, values)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@quick
def test_every_kind_comes_back_as_it_was(kind: type, data: st.DataObject) -> None:
    envelope = data.draw(ENVELOPES[kind])
    back = decode(encode(envelope), MOST_BYTES)
    assert back == envelope
    assert type(back.message) is kind
    assert repr(back) == repr(envelope), "types are kept as well"


HOLDERS = [kind for kind in KINDS if re.search(r"\b(Request|Entry)\b", str(vars(kind).get("__annotations__")))]


@pytest.mark.parametrize("kind", HOLDERS)
@given(data=st.data())
@quick
def test_requests_are_named_without_reading_them(kind: type, data: st.DataObject) -> None:
    envelope = data.draw(ENVELOPES[kind])
    assert attempts_in(encode(envelope)) == attempts_of(Received("x", envelope.message, 1))


def test_a_frame_of_many_names_none() -> None:
    many = Envelope("gateway-0", 1, 1, messages.Declare((REQUEST,) * (MOST_NAMED + 1)))
    assert attempts_in(encode(many)) == (), "and makes nothing of a frame that is too large to be read"


@given(frame=st.binary(max_size=200))
@settings(deadline=None, max_examples=examples(300))
def test_what_is_no_frame_names_none(frame: bytes) -> None:
    assert attempts_in(frame) == ()
    assert attempts_in(encode(TOKENS)) == (), "nobody's process is asked why it ended at tokens"


@pytest.mark.parametrize("envelope", [COMMIT, TOKENS], ids=["commit", "tokens"])
def test_a_frame_cut_anywhere_is_refused(envelope: Envelope) -> None:
    frame = encode(envelope)
    for length in range(len(frame)):
        refused(frame[:length])
        assert attempts_in(frame[:length]) == ()
    refused(frame + b"\0")


@given(envelope=ANY_ENVELOPE, data=st.data())
@quick
def test_a_frame_with_a_wrong_byte_is_refused_or_read(envelope: Envelope, data: st.DataObject) -> None:
    frame = bytearray(encode(envelope))
    for _ in range(8):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
        read_or_refused(bytes(frame))


@given(frame=st.binary(max_size=200))
@settings(deadline=None, max_examples=examples(300))
def test_random_bytes_are_refused(frame: bytes) -> None:
    refused(frame)


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), WHOLE, st.floats(), st.text(max_size=5), st.binary(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=12,
)


@given(kind=st.sampled_from([kind.__name__ for kind in KINDS]), values=st.lists(ANYTHING, max_size=6))
@settings(deadline=None, max_examples=examples(300))
def test_fields_of_any_kind_are_refused_or_fit(kind: str, values: list[Any]) -> None:
    read_or_refused(with_fields(kind, *values))


@given(envelope=ANY_ENVELOPE, wrong=ANYTHING, data=st.data())
@settings(deadline=None, max_examples=examples(200), suppress_health_check=[HealthCheck.too_slow])
def test_a_wrong_value_anywhere_is_refused_or_fits(envelope: Envelope, wrong: Any, data: st.DataObject) -> None:
    """A single value in the frame of a real message is replaced, however deep it lies."""
    top = msgpack.decode(encode(envelope))
    inner = top
    while True:
        place = data.draw(st.integers(0, len(inner) - 1))
        if isinstance(inner[place], list) and inner[place] and data.draw(st.booleans()):
            inner = inner[place]
            continue
        inner[place] = wrong
        break
    read_or_refused(packed(*top))


def read_or_refused(frame: bytes) -> None:
    """Check that a frame is refused, or read as a message that can be sent on and reads the same."""
    try:
        envelope = decode(frame, MOST_BYTES)
    except WireError:
        refused(frame)
        return
    assert all(type(head) is int for head in (envelope.incarnation, envelope.number))
    again = decode(encode(envelope), MOST_BYTES)
    assert repr(again) == repr(envelope)  # NaN is not equal to itself


@pytest.mark.parametrize(
    "version", [0, 1, 2, 3, 4, 5, 6, 7, 9, -8, True, 8.0, "8", None, [2], {}, 2**64 - 1, "x" * 10_000]
)
def test_an_unknown_version_is_named(version: Any) -> None:
    message = refused(packed(version, "x", 1, 1, "AskPages", ASK))
    assert f"frame of 'x' has version {version!r:.40}, this process speaks {VERSION}: run one version" in message


@pytest.mark.parametrize("read", [None, 1, {}, "text", [], [[]], b""])
def test_what_is_no_frame_at_all(read: Any) -> None:
    refused(bytes(msgpack.encode(read)))


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("x", 1, 1, "AskPages"),
        ("x", 1, 1, "AskPages", ASK, 0),
        ("x", 1, 1, "Nothing", (1,)),
        ("x", 1, 1, "Member", ("n", "pool", "n", 1, "a", "t")),  # a type that travels within messages only
        ("x", 1, 1, 5, ASK),
        ("x", 1, 1, "AskPages", {}),
        ("x", 1, 1, "AskPages", 1),
        (5, 1, 1, "AskPages", ASK),
        (b"x", 1, 1, "AskPages", ASK),
        ("x", "1", 1, "AskPages", ASK),
        ("x", True, 1, "AskPages", ASK),
        ("x", 1, False, "AskPages", ASK),
        ("x", 1, 1.0, "AskPages", ASK),
        ("x", None, 1, "AskPages", ASK),
    ],
)
def test_a_head_that_is_not_one(values: tuple[Any, ...]) -> None:
    refused(packed(VERSION, *values))


FITTING: list[tuple[str, tuple[Any, ...]]] = [
    ("AskPages", ASK),
    ("LeasePages", ((1, 2), 0)),
    ("Missed", ()),
    ("Acknowledge", (("r",),)),
    ("Refused", ("r", 1, "too_late", "why", 1.0)),
    ("Heartbeat", (("n", "pool", "node", 1, "a", "t", False), 0.0)),
    ("Tokens", ((("r", 1, 0, (1,), "stop", (), None),),)),
    ("Progress", ((("r", 1),), (), (), (), (), (), (), 0, (0.5, 0.001, 0.25, 0.002, 0.001, (1e-05, 0.0)))),
    ("Infeasible", ("r", 1)),
]


@pytest.mark.parametrize(("kind", "values"), FITTING)
def test_fields_that_fit(kind: str, values: tuple[Any, ...]) -> None:
    """The fields into which the next test puts wrong values are accepted with right values."""
    assert type(decode(with_fields(kind, *values), MOST_BYTES).message).__name__ == kind


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("AskPages", ()),
        ("AskPages", (True, *ASK[1:])),
        ("AskPages", (1.0, *ASK[1:])),
        ("AskPages", ("1", *ASK[1:])),
        ("AskPages", (None, *ASK[1:])),
        ("AskPages", (1, 0, 1, False)),
        ("AskPages", (1, 0, (), 0)),
        ("LeasePages", (1, 0)),
        ("LeasePages", ((1, "2"), 0)),
        ("LeasePages", ((1, True), 0)),
        ("Acknowledge", ((b"r",),)),
        ("Acknowledge", (("r", 1),)),
        ("Refused", ("r", 1, "too_late", "why", "soon")),
        ("Refused", ("r", 1, "too_late", "why", True)),
        ("Heartbeat", (("n", "king", "node", 1, "a"),)),
        ("Heartbeat", (("n", ["pool"], "node", 1, "a"),)),
        ("Heartbeat", (("n", "pool", "node", 1),)),
        ("Tokens", ((("r", 1, 0, (1,), "bored", (), None),),)),
        ("Tokens", ((("r", 1, 0, (1,), "stop", (0.5,), None),),)),
        ("Progress", ((("r",),), (), (), (), (), (), (), 0, (0.0, 0.0, 0.0, 0.0, 0.0, (0.0, 0.0)))),
        ("Progress", ((("r", 1, 1),), (), (), (), (), (), (), 0, (0.0, 0.0, 0.0, 0.0, 0.0, (0.0, 0.0)))),
        ("Infeasible", ("r", 1.5)),
        ("Infeasible", ("r",)),
        ("Tokens", ((("r", 1, 0, (1,), "stop", (), None, 1),),)),
    ],
)
def test_fields_that_do_not_fit(kind: str, values: tuple[Any, ...]) -> None:
    refused(with_fields(kind, *values))


@pytest.mark.parametrize(
    ("kind", "values", "known"),
    [
        ("AskPages", (1,), ASK),
        ("AskPages", ASK[:-1], ASK),
        ("AskPages", (*ASK, {"later": 1}), ASK),
        ("Missed", (1,), ()),
        ("Holding", ((("r", 1),),), ((("r", 1),), 0, False, False)),
        ("Heartbeat", (("n", "pool", "node", 1, "a"),), (("n", "pool", "node", 1, "a", "", False), 0.0)),
        ("Heartbeat", (("n", "pool", "node", 1, "a", "t", False, "later"), 0.0), FITTING[5][1]),
        ("Progress", ((("r", 1),),), ((("r", 1),), (), (), (), (), (), (), 0, (0.0,) * 5 + ((0.0, 0.0),))),
        ("Tokens", ((("r", 1, 0, (1,), "stop"),),), FITTING[6][1]),
    ],
)
def test_fields_of_an_earlier_and_a_later_version(kind: str, values: tuple[Any, ...], known: tuple[Any, ...]) -> None:
    """Last fields that are missing have their defaults, and those that are not known are skipped."""
    assert decode(with_fields(kind, *values), MOST_BYTES) == decode(with_fields(kind, *known), MOST_BYTES)


def test_what_a_noun_refuses_is_refused_here() -> None:
    """The type's own rules hold on the wire too: Sampling has no negative temperature."""
    top = msgpack.decode(encode(COMMIT))
    sampling = top[-1][0][0][5]
    for place, wrong in ((0, -1.0), (0, math.nan), (1, -1), (2, 0.0), (4, 1.5), (5, 0.0), (9, [[-1, 1.0]]), (11, [[]])):
        top[-1][0][0][5] = [*sampling[:place], wrong, *sampling[place + 1 :]]
        assert re.search("no valid Commit: .*(must|choice)", refused(packed(*top)))


def test_a_long_wrong_value_makes_no_long_log_line() -> None:
    refused(with_fields("Heartbeat", ("n", "k" * 100_000, "node", 1, "a")))
    refused(packed(VERSION, "x", 1, 1, "K" * 100_000, ()))


def test_a_whole_number_will_do_for_a_float() -> None:
    back = decode(with_fields("Refused", "r", 1, "too_late", "why", 2), MOST_BYTES)
    assert repr(back.message) == repr(Refused("r", 1, Rejection.LATE, "why", 2.0))
    assert encode(replace(TOKENS, message=Refused("r", 1, Rejection.LATE, "why", 2))) == encode(
        replace(back, sender="decode0", incarnation=5)
    )


def test_a_frame_over_the_limit_is_not_even_read() -> None:
    frame = encode(COMMIT)
    assert decode(frame, len(frame)) == COMMIT
    message = refused(frame, len(frame) - 1)
    assert f"{len(frame)} bytes exceeds the limit of {len(frame) - 1}" in message


@pytest.mark.parametrize("whole", [2**64, -(2**63) - 1, 10**400])
def test_numbers_that_no_frame_can_hold_are_refused_by_the_sender(whole: int) -> None:
    for envelope in (replace(TOKENS, number=whole), replace(TOKENS, message=messages.AskPages(whole))):
        with pytest.raises(WireError, match="cannot be sent"):
            encode(envelope)


def test_outputs_are_checked_by_their_receiver_and_refused_by_the_sender_where_no_frame_can_hold_them() -> None:
    def tokens(index: Any) -> Envelope:
        return replace(TOKENS, message=Tokens((Output("r", 0, index, (7,), None),)))

    assert "no valid Tokens" in refused(encode(tokens("first")))
    for index in (2**64, object()):
        with pytest.raises(WireError, match="a Tokens cannot be sent"):
            encode(tokens(index))


def test_text_that_is_no_text_is_refused_by_the_sender() -> None:
    with pytest.raises(WireError, match="cannot be sent"):
        encode(replace(TOKENS, message=Refused("r", 1, Rejection.LATE, "half a \ud83d", 0.0)))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x91" * 5_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc7\x05\xff12345",
        b"\xd7\xff" + b"\xff" * 8,
        b"\x96\x02\xd6\xff\0\0\0\0",
        b"\x81\x90\x01",
        b"\x96\x02\xa1\xff\x01\x01\xa1a\x90",
    ],
)
def test_msgpack_s_own_traps(frame: bytes) -> None:
    refused(frame)


def test_roles_travel_by_value() -> None:
    member = Member("decode0", Role.DECODE, "node1", 7, "tcp://127.0.0.1:5")
    assert b"decode" in encode(Envelope("decode0", 7, 0, Heartbeat(member)))
    back = decode(encode(Envelope("decode0", 7, 0, Heartbeat(member))), MOST_BYTES)
    assert back.message == Heartbeat(member)
    assert isinstance(back.message, Heartbeat)
    assert back.message.member.role is Role.DECODE


@given(first=ANY_ENVELOPE, second=ANY_ENVELOPE)
@quick
def test_different_messages_make_different_frames(first: Envelope, second: Envelope) -> None:
    assume(repr(first) != repr(second))
    assert encode(first) != encode(second)
