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
from msgspec import msgpack

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
from alignedserve.protocol.messages import Commit, Heartbeat, Member, Output, Refused, Tokens
from alignedserve.protocol.wire import VERSION, Envelope, decode, encode
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
    return is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, tuple))


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


def test_the_format_is_that_of_its_version() -> None:
    """If a change of the format is meant, raise wire.VERSION (once per release) and put the new snapshot here.

    A process of the old format must be told that its format is old, not misread what it gets.
    """
    assert VERSION == 7
    assert encode(TOKENS) == TOKENS_FRAME
    assert encode(COMMIT) == COMMIT_FRAME
    assert schema() == SCHEMA


TOKENS_FRAME = (
    b"\x96\x07\xa7decode0\x05\x01\xa6Tokens\x91\x92\x97\xa2r1\x01\x00\x92\x07\x08\xa4stop\x90\xc0\x97\xa1s\x01"
    b"\x00\x91\x07\xc0\x91\x92\xcb\xbf\xe0\x00\x00\x00\x00\x00\x00\x91\x92\x07\xcb\xbf\xe0\x00\x00\x00\x00\x00"
    b"\x00\x94\x91\x92\xcb\xbf\xf8\x00\x00\x00\x00\x00\x00\x90\x00\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xc4\x00"
)
COMMIT_FRAME = (
    b"\x96\x07\xa8prefill0\xcf\x17\x97\x9c\xfe6*\x00\x00\x03\xa6Co"
    b"mmit\x93\x98\xdc\x00\x13\xa2r1\xa8gateway0\x02\x93\x01"
    b"\xcc\xc8\xce\x00\x01\x11p\x91\x05\xdc\x00\x10\xcb?\xe0\x00\x00\x00\x00\x00\x00(\xcb?"
    b"\xec\xcc\xcc\xcc\xcc\xcc\xcd\xf9\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xcb?\xf0\x00\x00\x00\x00"
    b"\x00\x00\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xcb\x00\x00\x00\x00\x00\x00\x00\x00\x00\x90\xc4\x00\xc0"
    b"\xa0\xc0\xc0\xc0\x10\x91\x02\xa2be\x94\xcb?\xf0\x00\x00\x00\x00\x00\x00\xcb?\xd0\x00"
    b"\x00\x00\x00\x00\x00\xcb@N\x00\x00\x00\x00\x00\x00\xc2\xcb@)\x00\x00\x00\x00\x00\x00"
    b"\xfd\xc0\xa0\xc0\xc0\xc0\x00\x01\x92\x05\t\x92\x04\x00\xc0\x90\x94\x90\x00\xcb\x00\x00\x00\x00\x00\x00"
    b"\x00\x00\xc4\x00\x90\x00\x00\xa0"
)
SCHEMA = [
    "Members(members: tuple[Member, ...])",
    "Heartbeat(member: Member, late_s: float)",
    "StepLate(member: str, late_s: float)",
    "Started(lives: tuple[Life, ...])",
    "Died(name: str, incarnation: int)",
    "Retire(name: str, incarnation: int)",
    "Submit(request: Request, sketch: Sketch | None)",
    "Cancel(request: str, attempt: int)",
    "Refused(request: str, attempt: int, reason: Rejection, why: str, retry_after_s: float)",
    "Infeasible(request: str, attempt: int)",
    "AttemptLost(request: str, attempt: int, died: bool, alone: bool)",
    "Acquit(request: str, attempt: int)",
    "Prefill(request: Request, decode: str)",
    "Reserve(is_on: bool)",
    "Expect(request: str, attempt: int, estimate: Estimate)",
    "Tokens(outputs: tuple[Output, ...])",
    "Resend(request: str, attempt: int, index: int)",
    "Acknowledge(requests: tuple[str, ...])",
    "Progress(committed: tuple[tuple[str, int], ...], joined: tuple[tuple[str, int], ...], ended: tuple[tuple[str, int]"
    ", ...], lengths: tuple[int, ...], lost: tuple[tuple[str, int], ...], unknown: tuple[tuple[str, int], ...], returne"
    "d: tuple[tuple[str, int], ...], free_blocks: int, backlog: Backlog, felled: tuple[tuple[str, int], ...])",
    "Report(band: tuple[int, int] | None, free_blocks: int, step_s: float, num_rt: int, num_late: int, given_blocks"
    ": int)",
    "Declare(requests: tuple[Request, ...], is_last: bool)",
    "Holding(attempts: tuple[tuple[str, int], ...], free_blocks: int, is_retiring: bool, is_reserved: bool)",
    "Inquire(attempts: tuple[tuple[str, int], ...])",
    "Missed()",
    "AskPages(pages: int, number: int, kept: tuple[int, ...], is_spare: bool)",
    "LeasePages(pages: tuple[int, ...], number: int)",
    "GiveBack()",
    "AskPrefix(request: str, attempt: int, names: tuple[int, ...], service: ServiceClass)",
    "Prefix(request: str, attempt: int, pages: tuple[int, ...])",
    "Spoiled(pages: tuple[int, ...])",
    "Compress(number: int, pages: tuple[int, ...], into: tuple[int, ...])",
    "Compressed(number: int, done: tuple[bool, ...])",
    "Commit(entry: Entry, num_known: int, to: str)",
    "Offer(entry: Entry, has_pool: bool)",
    "Decline(request: str, attempt: int, is_failed: bool)",
    "Pull(number: int, request: str, attempt: int)",
    "Prefetch(entries: tuple[Entry, ...], waits_s: tuple[float, ...])",
    "Evict(entry: Entry, wait_s: float)",
    "Prefetched(attempts: tuple[tuple[str, int], ...])",
    "LetGo(attempts: tuple[tuple[str, int], ...])",
    "Kept(request: str, attempt: int, pages: tuple[int, ...], names: tuple[int, ...])",
    "Keep(request: str, attempt: int, num_known: int, pages: tuple[int, ...], names: tuple[int, ...], service: ServiceC"
    "lass, goes_on: bool)",
    "AskBatch(blocks: int, requests: int, times: StepTimes, copy_token_s: float, all_blocks: int, most_requests: int, b"
    "and: tuple[int, int] | None, rt_blocks: int, wants_batch: bool, ahead: int, wait_s: float)",
    "Batch(entries: tuple[Entry, ...], is_pinned: bool, is_dynamic: bool)",
    "Release(request: str, attempt: int, to: str)",
    "Figures(usage: Usage | None, num_refused: int, num_compressed: int, num_incompressible: int, num_failed_transfers:"
    " int, rebuilt_s: float | None, steps: DecodeSteps | None, lengths: DecodeLengths | None, holders: tuple[PagesFor, "
    "...], slowdown: float, worker: WorkerLoad | None, process: ProcessFigures | None, rt: Stages | None, be: Stages | "
    "None, returned: ByClass, lost: ByClass, member: str)",
    "AskDecisions(number: int, request: str)",
    "Decisions(number: int, now: float, findings: Findings)",
    "Member(name: str, role: Role, node: str, incarnation: int, address: str, transport: str, lends: bool)",
    "Life(name: str, role: Role, incarnation: int)",
    "Request(id: str, owner: str, attempt: int, prompt: tuple[int, ...], emitted: tuple[int, ...], sampling: Sampling, "
    "max_tokens: int, stop_tokens: tuple[int, ...], service: ServiceClass, slo: Slo, arrival_at: float, priority: int, "
    "emitted_at: float | None, salt: str, estimate: Estimate | None, pooling: Pooling | None, adapter: Adapter | None, "
    "deaths: int, weight: int)",
    "Sketch(counts: bytes)",
    "Rejection: too_many_open queue_full too_late infeasible policy given_up culprit",
    "Estimate(mean: int, upper: int)",
    "Output(request: str, attempt: int, index: int, tokens: tuple[int, ...], finish: FinishReason | None, logprobs: tup"
    "le[Logprob, ...], opening: Opening | None)",
    "Backlog(prompts_s: float, prompt_token_s: float, rt_prompts_s: float, loaded_token_s: float, rt_loaded_token_s: fl"
    "oat, copying: CopyCost)",
    "ServiceClass: rt be",
    "Entry(request: Request, output: tuple[int, ...], pages: tuple[int, ...], due: Due | None, logprobs: tuple[Logprob,"
    " ...], opening: Opening, names: tuple[int, ...], dropped: int)",
    "StepTimes(mean_s: float, most_s: float)",
    "Usage(rt: int, be: int, shared: int, idle: int, leased: int, free: int)",
    "DecodeSteps(by_batches: tuple[int, ...], spread: Tally, switches: int, prefetched: int, in_vain: int, held_back: i"
    "nt)",
    "DecodeLengths(batch: Lengths, guests: Lengths, prompts: Lengths, waiting: Lengths, coming: Lengths, band: tuple[in"
    "t, int] | None)",
    "PagesFor(worker: str, leased: int, kept: int)",
    "WorkerLoad(running: ByClass, waiting: ByClass, used: float, slack_s: float | None, step_tokens: Tally, step_s: Tal"
    "ly, step_ratio: Tally, length_ratio: Tally, preempted: tuple[Preempted, ...], is_retiring: bool)",
    "ProcessFigures(cpu_s: float, resident_bytes: int, num_files: int, started_at: float, failed: tuple[FailedPol"
    "icy, ...], python: str, garbage: tuple[Garbage, ...], fell_back: tuple[Fallback, ...], weights: str, machine: Mach"
    "ineFigures | None)",
    "Stages(unplaced: int, prefill: int, pool: int, decode: int)",
    "ByClass(rt: int, be: int)",
    "Findings(decisions: tuple[Decision, ...], steps: tuple[Step, ...], since: float)",
    "Role: router gateway prefill decode pool jobs",
    "Sampling(temperature: float, top_k: int, top_p: float, seed: int, min_p: float, repetition_penalty: float, presenc"
    "e_penalty: float, frequency_penalty: float, min_tokens: int, logit_bias: tuple[tuple[int, float], ...], allowed_to"
    "kens: bytes, grammar: Choice | None, syntax: str, reasoning: Reasoning | None, logpro"
    "bs: int | None, prompt_logprobs: int | None)",
    "Slo(ttft_s: float, tbt_s: float, jct_s: float, strict: bool)",
    "Pooling(task: PooledTask, is_whole: bool, dimensions: int | None, second_at: int | None)",
    "Adapter(name: str, folder: str, id: str)",
    "FinishReason: stop length error doubt",
    "Logprob(value: float, top: tuple[tuple[int, float], ...])",
    "Opening(logprobs: tuple[Logprob, ...], num_cached: int, waited_s: float, vector: bytes)",
    "CopyCost(token_s: float, fixed_s: float)",
    "Due(at: float, num_missed: int)",
    "Tally(buckets: tuple[int, ...], total: float)",
    "Lengths(rt: tuple[int, ...], be: tuple[int, ...], num_rt: int, num_be: int)",
    "Preempted(cause: PreemptionCause, service: ServiceClass, keeps_kv: bool, number: int)",
    "FailedPolicy(kind: PolicyKind, how: PolicyFailure, number: int)",
    "Garbage(collections: int, collected: int, uncollectable: int)",
    "Fallback(what: str, why: str, instead: str)",
    "MachineFigures(busy_cores: float | None, cores: int, used_bytes: int, total_bytes: int, gpus: tuple[GpuFigures, .."
    ".])",
    "Decision(kind: Kind, at: float, request: str, attempt: int, service: ServiceClass, salt: str, other: str, tokens: "
    "int, number: int, seconds: float, expected_s: float, why: str)",
    "Step(number: int, began_at: float, seconds: float, predicted_s: float, prompt_tokens: int, decodes: int)",
    "Choice(outputs: tuple[tuple[int, ...], ...])",
    "Reasoning(family: str, inside: bool, opening: tuple[int, ...], closing: tuple[int, ...], most_tokens: int | None, "
    "calls: bool)",
    "PooledTask: embed score",
    "PreemptionCause: memory ahead real_time level worth crowded",
    "PolicyKind: order packing placement admission predictor",
    "PolicyFailure: raised nonsense slow",
    "GpuFigures(busy: float | None, used_bytes: int | None, total_bytes: int | None)",
    "Kind: arrived declared refused predicted placed moved cancelled replaced queued behind beside seated chunk offered"
    " writes committed candidate joining joined displaced dropped ended lost",
]


def schema() -> list[str]:
    """Return a line for every type that travels: its fields in their order, or its values."""
    lines, found = [], [*KINDS]
    for kind in found:  # the list grows on the way
        if is_record(kind):
            hints = typing.get_type_hints(kind)
            lines.append(f"{kind.__name__}({', '.join(f'{name}: {shown(hint)}' for name, hint in hints.items())})")
            inside = [inner for hint in hints.values() for inner in types_in(hint)]
            found += [inner for inner in dict.fromkeys(inside) if inner not in found]
        elif issubclass(kind, Enum):
            lines.append(f"{kind.__name__}: {' '.join(member.value for member in kind)}")
    return lines


def shown(hint: Any) -> str:
    """Return a type as it would be written out, with aliases resolved."""
    origin, args = typing.get_origin(hint), [shown(arg) for arg in typing.get_args(hint)]
    if origin is tuple:
        return f"tuple[{', '.join(args)}]"
    if args:
        return " | ".join(args)
    return {Ellipsis: "...", type(None): "None"}.get(hint) or str(hint.__name__)


def types_in(hint: Any) -> list[type]:
    if args := typing.get_args(hint):
        return [inner for arg in args for inner in types_in(arg)]
    return [hint] if isinstance(hint, type) else []


@pytest.mark.parametrize("envelope", [COMMIT, TOKENS], ids=["commit", "tokens"])
def test_a_frame_cut_anywhere_is_refused(envelope: Envelope) -> None:
    frame = encode(envelope)
    for length in range(len(frame)):
        refused(frame[:length])
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
    "version", [0, 1, 2, 3, 4, 5, 6, 8, -7, True, 7.0, "7", None, [2], {}, 2**64 - 1, "x" * 10_000]
)
def test_an_unknown_version_is_named(version: Any) -> None:
    message = refused(packed(version, "x", 1, 1, "AskPages", ASK))
    assert f"speaks {VERSION}" in message


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
    ("Progress", ((("r", 1),), (), (), (), (), (), (), 0, (0.5, 0.001, 0.25, 0.002, 0.001, (1e-05, 0.0)), ())),
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
        ("AskPages", ASK[:-1]),
        ("AskPages", (*ASK, 1)),
        ("AskPages", (True, *ASK[1:])),
        ("AskPages", (1.0, *ASK[1:])),
        ("AskPages", ("1", *ASK[1:])),
        ("AskPages", (None, *ASK[1:])),
        ("AskPages", (1, 0, 1, False)),
        ("AskPages", (1, 0, (), 0)),
        ("LeasePages", (1, 0)),
        ("LeasePages", ((1, "2"), 0)),
        ("LeasePages", ((1, True), 0)),
        ("Missed", (1,)),
        ("Acknowledge", ((b"r",),)),
        ("Acknowledge", (("r", 1),)),
        ("Refused", ("r", 1, "too_late", "why", "soon")),
        ("Refused", ("r", 1, "too_late", "why", True)),
        ("Heartbeat", (("n", "king", "node", 1, "a"),)),
        ("Heartbeat", (("n", ["pool"], "node", 1, "a"),)),
        ("Heartbeat", (("n", "pool", "node", 1),)),
        ("Tokens", ((("r", 1, 0, (1,), "bored", (), None),),)),
        ("Tokens", ((("r", 1, 0, (1,), "stop", (0.5,), None),),)),
        ("Progress", ((("r",),), (), (), (), (), (), (), 0, (0.0, 0.0, 0.0, 0.0, 0.0, (0.0, 0.0)), ())),
        ("Progress", ((("r", 1, 1),), (), (), (), (), (), (), 0, (0.0, 0.0, 0.0, 0.0, 0.0, (0.0, 0.0)), ())),
        ("Progress", ((("r", 1),), (), (), (), (), (), (), 0, (0.5, 0.001, 0.25), ())),
        ("Infeasible", ("r", 1.5)),
    ],
)
def test_fields_that_do_not_fit(kind: str, values: tuple[Any, ...]) -> None:
    refused(with_fields(kind, *values))


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
