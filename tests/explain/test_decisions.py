"""The ring of decisions: bounded, and what it tells about one request."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.core import Chunk, KvForm, Sampling, ServiceClass, StepPlan
from alignedserve.explain.decisions import Decision, DecisionRing, Kind, Step
from tests.samples import request

A, B, C = request("a"), request("b"), request("c")


def kinds(ring: DecisionRing, name: str) -> list[Kind]:
    return [noted.kind for noted in ring.about(name).decisions]


def step(number: int, *chunks: Chunk) -> StepPlan:
    return StepPlan(number, chunks, predicted_s=0.25)


def test_it_tells_of_one_request_and_when() -> None:
    ring = DecisionRing()
    ring.note(Kind.QUEUED, A, number=2)
    ring.now = 1.5
    ring.note(Kind.QUEUED, B)
    ring.note(Kind.SEATED, A, tokens=64)
    assert [(noted.kind, noted.at) for noted in ring.about("a").decisions] == [(Kind.QUEUED, 0.0), (Kind.SEATED, 1.5)]
    assert ring.about("unknown").decisions == ()


def test_the_request_that_got_the_memory_hears_of_the_one_that_gave_it_up() -> None:
    ring = DecisionRing()
    ring.note(Kind.DISPLACED, A, "b")
    assert kinds(ring, "a") == kinds(ring, "b") == [Kind.DISPLACED]
    assert ring.about("b").decisions[0].request == "a"


def test_it_forgets_the_oldest_and_says_from_when_on_it_remembers() -> None:
    ring = DecisionRing(most_decisions=2)
    ring.note(Kind.ARRIVED, A)
    assert ring.about("a").since == 0.0
    for kind, now in ((Kind.QUEUED, 2.0), (Kind.SEATED, 3.0)):
        ring.now = now
        ring.note(kind, A)
    assert kinds(ring, "a") == [Kind.QUEUED, Kind.SEATED]
    assert ring.about("a").since == 2.0


def test_steps_are_told_that_ran_while_the_request_was_here() -> None:
    ring = DecisionRing(most_steps=3)
    chunk = Chunk("a", (1, 2, 3), 0, KvForm((0,)), Sampling())
    for number in range(1, 7):
        ring.now = float(number)
        if number == 3:
            ring.note(Kind.QUEUED, A)
        ring.note_step(step(number, chunk), 0.5)
        if number == 5:
            ring.note(Kind.ENDED, A)
    assert ring.about("a").steps == (Step(4, 3.5, 0.5, 0.25, 3, 0), Step(5, 4.5, 0.5, 0.25, 3, 0))
    assert ring.about("b").steps == ()


def test_steps_that_are_forgotten_are_said_too() -> None:
    ring = DecisionRing(most_steps=2)
    ring.note(Kind.QUEUED, A)
    for number in (1, 2, 3):
        ring.now = float(number)
        ring.note_step(step(number), 0.5)
    assert ring.about("a").since == 1.5


def test_steps_end_where_another_worker_may_have_the_request() -> None:
    ring = DecisionRing()
    ring.note(Kind.QUEUED, A)
    ring.now = 1.0
    ring.note(Kind.OFFERED, A)
    ring.now = 3.0
    ring.note_step(step(1), 0.5)
    assert ring.about("a").steps == ()


def test_steps_go_on_until_now_for_a_request_that_is_still_here() -> None:
    ring = DecisionRing()
    ring.note(Kind.QUEUED, A)
    for number in (1, 2):
        ring.now = float(number)
        ring.note_step(step(number), 0.5)
    assert [told.number for told in ring.about("a").steps] == [1, 2]


def behind(ring: DecisionRing, name: str) -> list[Decision]:
    return [noted for noted in ring.about(name).decisions if noted.kind is Kind.BEHIND]


def test_what_ran_while_a_request_waited_is_counted_and_not_named() -> None:
    ring = DecisionRing()
    ring.note(Kind.QUEUED, A)
    for now, of, tokens in ((1.0, B, 100), (2.0, B, 50), (2.0, C, 10), (3.0, A, 5), (4.0, B, 7)):
        ring.now = now
        ring.note(Kind.CHUNK, of, tokens=tokens, seconds=1.0)
    (told,) = behind(ring, "a")
    assert (told.at, told.number, told.tokens, told.why) == (2.0, 2, 160, "2 rt")
    assert behind(ring, "b") == []


def test_a_request_that_still_waits_is_told_what_has_run_so_far() -> None:
    ring = DecisionRing()
    ring.note(Kind.QUEUED, A)
    ring.now = 1.0
    ring.note(Kind.CHUNK, B, tokens=100, seconds=0.5)
    (told,) = behind(ring, "a")
    assert (told.number, told.tokens) == (1, 100)


def beside(ring: DecisionRing, name: str) -> list[tuple[float, int, str]]:
    found = ring.about(name).decisions
    return [(noted.at, noted.number, noted.why) for noted in found if noted.kind is Kind.BESIDE]


def test_those_that_decoded_while_a_request_waited_for_memory_are_counted_by_class() -> None:
    ring, document = DecisionRing(), replace(request("d"), service=ServiceClass.BE)
    for now, kind, of in (
        (1.0, Kind.JOINED, A),
        (1.0, Kind.JOINED, B),
        (2.0, Kind.DISPLACED, B),  # before the wait
        (3.0, Kind.CANDIDATE, document),
        (4.0, Kind.JOINED, C),
        (4.5, Kind.DROPPED, C),
        (5.0, Kind.JOINING, document),
        (6.0, Kind.JOINED, B),  # after it
    ):
        ring.now = now
        ring.note(kind, of)
    assert beside(ring, "d") == [(5.0, 2, "2 rt")]
    kept = [noted.kind for noted in ring.about("d").decisions]
    assert kept == [Kind.CANDIDATE, Kind.BESIDE, Kind.JOINING], "it is a part of the wait"


def test_a_request_that_waited_for_nobody_is_told_of_nobody() -> None:
    ring = DecisionRing()
    ring.note(Kind.JOINED, B)
    ring.note(Kind.CANDIDATE, A)
    ring.note(Kind.JOINING, A)
    assert kinds(ring, "a") == [Kind.CANDIDATE, Kind.JOINING]


def test_a_request_that_gave_up_its_memory_is_told_who_decoded_meanwhile() -> None:
    ring = DecisionRing()
    ring.note(Kind.JOINED, B)
    ring.note(Kind.DISPLACED, A, "b")
    ring.now = 2.0
    ring.note(Kind.COMMITTED, A)
    ring.now = 3.0
    assert beside(ring, "a") == [(2.0, 1, "1 rt")]


def test_those_that_decoded_while_a_request_was_in_the_pool_are_counted_from_when_it_came() -> None:
    ring = DecisionRing()
    ring.now = 2.0
    ring.note(Kind.JOINED, B)
    ring.now = 2.5
    ring.note(Kind.ENDED, B)
    ring.now = 5.0
    ring.note(Kind.CANDIDATE, A, seconds=3.0)
    assert beside(ring, "a") == [(5.0, 1, "1 rt")]
    ring.note(Kind.CANDIDATE, C, seconds=2.0)
    assert beside(ring, "c") == [], "it came later"


def test_a_request_that_gave_up_its_memory_waits_in_the_pool_from_then_on() -> None:
    ring = DecisionRing()
    for now, kind, of in ((1.0, Kind.JOINED, B), (2.0, Kind.ENDED, B), (3.0, Kind.COMMITTED, A)):
        ring.now = now
        ring.note(kind, of)
    ring.now = 4.0
    ring.note(Kind.CANDIDATE, A, seconds=4.0)
    assert beside(ring, "a") == []
