"""Generated workloads: the same from the same seed, and with the kinds and times of requests that were asked for."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config.topology import Topology
from alignedserve.core import Request, ServiceClass, Slo
from alignedserve.errors import WorkloadError
from alignedserve.lab.loads.workload import Arrival, Load, Mixture, Workload, arrivals
from alignedserve.lab.loads.workload.amounts import (
    Amount,
    DrawnSizes,
    Fixed,
    RecordedLengths,
    Sampled,
    ShortLong,
    Uniform,
)
from alignedserve.lab.loads.workload.files import read_trace
from alignedserve.lab.loads.workload.pace import AtOnce, Bursts, ClosedArrivals, Diurnal, Gamma, OpenArrivals, Recorded
from alignedserve.lab.loads.workload.spec import read_workload
from alignedserve.lab.loads.workload.stream import ClientLimits, Span, Stream, StreamPromise, Turns
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import Settings
from tests.simulator.summary import simulate, summary_of

DATA = Path(__file__).parent / "data"
SMALL = DrawnSizes(Uniform(1, 30), Uniform(1, 10))
TALK = Stream(
    "talk",
    Gamma(2.0),
    SMALL,
    turns=Turns(Uniform(1, 5), 12),
    clients=ClientLimits(context=150),
    span=Span(num_requests=6),
)
LOTS = Stream("lots", ClosedArrivals(4), SMALL, StreamPromise(ServiceClass.BE), span=Span(num_requests=14))
OWNERS = ("gateway-0", "gateway-1")

quickly = settings(max_examples=40, derandomize=True, deadline=None, database=None)
seeds = st.integers(0, 2**32)


def drawn(*streams: Stream, seed: int = 1, start_at: float = 0.0) -> list[Arrival]:
    return list(arrivals(Mixture(streams), OWNERS, seed, start_at))


def times(open_: OpenArrivals, number: int) -> list[float]:
    return list(islice(open_.after(Random(5)), number))


@dataclass
class Play:
    """Play a workload whose answers take random times."""

    workload: Mixture
    seed: int = 1
    failing: float = 0.0  # share of requests without an answer
    arrived: list[Arrival] = field(default_factory=list)
    ended_at: dict[str, float] = field(default_factory=dict)
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_open: list[int] = field(default_factory=list)  # number of open requests after each event

    def run(self) -> Play:
        load, draw, serials = Load(self.workload, OWNERS, self.seed), Random(self.seed), count()
        open_: set[str] = set()
        heap: list[tuple[float, int, Arrival, bool]] = []

        def expect(coming: list[Arrival]) -> None:
            for arrival in coming:
                heapq.heappush(heap, (arrival.request.arrival_at, next(serials), arrival, False))

        expect(load.start(0.0))
        while heap:
            now, _, arrival, ends = heapq.heappop(heap)
            name = arrival.request.id
            if ends:
                open_.remove(name)
                self.ended_at[name] = now
                expect(load.ended(name, now, self._answer(arrival, draw)))
            else:
                open_.add(name)
                self.arrived.append(arrival)
                expect(load.arrived(name))
                heapq.heappush(heap, (now + draw.uniform(0.1, 3.0), next(serials), arrival, True))
            self.num_open.append(len(open_))
        return self

    def _answer(self, arrival: Arrival, draw: Random) -> tuple[int, ...] | None:
        if draw.random() < self.failing:
            return None
        self.answers[arrival.request.id] = (7,) * min(arrival.length, arrival.request.max_tokens)
        return self.answers[arrival.request.id]

    @property
    def requests(self) -> dict[str, Request]:
        return {arrival.request.id: arrival.request for arrival in self.arrived}


# --- Seeds


def digest(found: list[Arrival]) -> str:
    """Return a digest with times rounded to a microsecond: the last bit of a logarithm depends on the C library."""
    plain = [
        (
            round(arrival.request.arrival_at, 6),
            replace(arrival.request, arrival_at=0.0),
            arrival.length,
            arrival.leaves_after_s is None,
        )
        for arrival in found
    ]
    return blake2b(repr(plain).encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("chat,num_requests=50", "7917238f849b8b34"),
        ("coserve,first_s=10", "ed3a1d9c671e0cf7"),
        ("diurnal,first_s=60", "b52341773b1d9e62"),
        ("bursts,first_s=40", "ebbe608d617e8852"),
        ("conversations,num_requests=10", "a76f21c8083abc85"),
    ],
)
def test_a_seed_says_it_all_in_every_process(text: str, known: str) -> None:
    """Another process has written down the digests."""
    assert digest(Play(read_workload(text)).run().arrived) == known


@quickly
@given(seeds)
def test_another_seed_is_another_workload(seed: int) -> None:
    stream = Stream(lengths=SMALL, span=Span(num_requests=5))
    assert drawn(stream, seed=seed) == drawn(stream, seed=seed) != drawn(stream, seed=seed + 1)


def test_a_stream_stays_the_same_whatever_is_beside_it() -> None:
    chat = Stream("chat", lengths=SMALL, span=Span(num_requests=20))
    beside = [arrival for arrival in drawn(LOTS, chat, TALK) if arrival.request.id.startswith("chat")]
    assert beside == drawn(chat)


def test_two_streams_of_one_name_are_refused() -> None:
    with pytest.raises(WorkloadError, match="2 streams are called lots"):
        Mixture((LOTS, LOTS))


def test_at_another_rate_the_same_requests_come_sooner() -> None:
    stream = Stream(arrivals=Gamma(2.0, 3.0), lengths=SMALL, span=Span(num_requests=30))
    slow, fast = drawn(stream), list(arrivals(Mixture((stream,)).at_rate(8.0), OWNERS, 1, 0.0))
    assert [arrival.request.prompt for arrival in slow] == [arrival.request.prompt for arrival in fast]
    assert [arrival.request.arrival_at / 4 for arrival in slow] == pytest.approx(
        [arrival.request.arrival_at for arrival in fast]
    )
    assert Mixture((stream,)).at_rate(0.0001).rate == pytest.approx(0.0001), "the lowest that there is"


# --- Times of arrival


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 5.0])
def test_intervals_have_the_rate_and_the_variation_that_were_asked_for(cv: float) -> None:
    found = times(Gamma(4.0, cv), 20_000)
    intervals = [later - earlier for earlier, later in zip([0.0, *found], found, strict=False)]
    assert fmean(intervals) == pytest.approx(1 / 4.0, rel=0.1)
    assert pstdev(intervals) / fmean(intervals) == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_the_rate_of_a_day_goes_up_and_down() -> None:
    day = Diurnal(1.0, 9.0, period_s=80.0)
    hours = Counter(int(at % 80 / 10) for at in times(day, 40_000))
    shares = [hours[hour] / 40_000 for hour in range(8)]
    assert shares == sorted(shares[:4]) + sorted(shares[4:], reverse=True)
    assert shares[0] == pytest.approx(0.125 * 1.4 / 5, rel=0.15)  # the mean of the first eighth is 1.4 a second
    assert times(day, 40_000)[-1] == pytest.approx(40_000 / day.mean_rate, rel=0.05)


def test_bursts_come_at_the_end_of_each_period() -> None:
    bursts = Bursts(calm=2.0, peak=30.0, every_s=10.0, lasts_s=1.0)
    found = times(bursts, 20_000)
    assert fmean(at % 10 >= 9 for at in found) == pytest.approx(30 / (30 + 9 * 2), rel=0.05)
    assert found[-1] == pytest.approx(20_000 / bursts.mean_rate, rel=0.05)


def test_all_at_once() -> None:
    found = drawn(Stream(arrivals=AtOnce(), lengths=SMALL, span=Span(num_requests=9)), start_at=3.0)
    assert [arrival.request.arrival_at for arrival in found] == [3.0] * 9


def test_a_trace_comes_as_it_was_recorded_at_any_speed() -> None:
    read = read_trace(DATA / "sharegpt300.csv")
    recorded, pairs = read.times, read.pairs
    found = list(arrivals(read_workload(f"trace:{DATA}/sharegpt300.csv,rate_scale=2"), OWNERS, 1, 5.0))
    assert [arrival.request.arrival_at for arrival in found] == pytest.approx(
        [5 + (at - recorded[0]) / 2 for at in recorded]
    )
    assert [(len(arrival.request.prompt), arrival.length) for arrival in found] == list(pairs)


def test_a_trace_at_a_rate() -> None:
    found = list(arrivals(read_workload(f"trace:{DATA}/sharegpt300.csv,rate=3"), OWNERS, 1, 0.0))
    assert 299 / found[-1].request.arrival_at == pytest.approx(3.0)


def test_a_stream_ends_by_number_or_by_time_and_an_endless_stream_is_refused() -> None:
    assert len(drawn(Stream(lengths=SMALL, span=Span(num_requests=7)))) == 7
    timed = drawn(Stream(lengths=SMALL, span=Span(first_s=5.0)), start_at=2.0)
    assert 4.0 < timed[-1].request.arrival_at <= 7.0
    with pytest.raises(WorkloadError, match="never ends"):
        Stream()


def test_an_endless_stream_is_drawn_as_it_is_needed() -> None:
    stream = Stream(arrivals=Gamma(1000.0), span=Span(num_requests=10**9))
    assert len(list(islice(arrivals(Mixture((stream,)), OWNERS, 1, 0.0), 20))) == 20


# --- Closed loops


@quickly
@given(seeds, st.integers(1, 9), st.integers(1, 40))
def test_a_lot_begins_when_the_last_lot_has_ended(seed: int, size: int, number: int) -> None:
    play = Play(Mixture((replace(LOTS, arrivals=ClosedArrivals(size), span=Span(num_requests=number)),)), seed).run()
    assert len(play.arrived) == number
    assert max(play.num_open) == min(size, number)
    for first in range(size, number, size):
        before = [arrival.request.id for arrival in play.arrived[first - size : first]]
        lot = play.arrived[first : first + size]
        assert {arrival.request.arrival_at for arrival in lot} == {max(play.ended_at[name] for name in before)}


@quickly
@given(seeds, st.integers(1, 9))
def test_replaced_one_by_one_as_many_are_open_until_the_end(seed: int, size: int) -> None:
    play = Play(
        Mixture((replace(LOTS, arrivals=ClosedArrivals(size, replace=True), span=Span(first_s=20.0)),)), seed
    ).run()
    assert max(play.num_open) == size
    assert max(arrival.request.arrival_at for arrival in play.arrived) > 15
    ends = sorted(at for at in play.ended_at.values() if at <= 20)
    assert [arrival.request.arrival_at for arrival in play.arrived[size:]] == ends


def test_whoever_is_refused_does_not_come_back_at_once() -> None:
    load = Load(Mixture((replace(LOTS, arrivals=ClosedArrivals(1)),)), OWNERS, seed=1)
    (first,) = load.start(0.0)
    load.arrived(first.request.id)
    (second,) = load.ended(first.request.id, 4.0, None)
    assert second.request.arrival_at == 5.0


# --- Conversations


def turns_of(play: Play) -> Iterator[tuple[Request, Request]]:
    """Yield each turn with the turn after it."""
    for name, request in play.requests.items():
        first, _, turn = name.partition(".")
        following = play.requests.get(f"{first}.{int(turn or 0) + 1}")
        if following is not None:
            yield request, following


@quickly
@given(seeds)
def test_a_turn_goes_on_from_all_that_was_said(seed: int) -> None:
    play = Play(Mixture((TALK,)), seed).run()
    for request, following in turns_of(play):
        said = request.prompt + play.answers[request.id]
        assert following.prompt[: len(said)] == said
        assert len(following.prompt) > len(said)
        assert following.arrival_at > play.ended_at[request.id]
    assert all(request.most_tokens <= 150 for request in play.requests.values())


def test_conversations_share_their_system_prompt_and_nothing_else() -> None:
    first = [arrival.request.prompt for arrival in drawn(replace(TALK, lengths=DrawnSizes(Fixed(20), Fixed(5))))]
    assert len({prompt[:12] for prompt in first}) == 1
    assert len({prompt[:16] for prompt in first}) == 6


def test_conversations_are_as_long_as_was_asked_for() -> None:
    long = replace(TALK, turns=Turns(Fixed(4)), clients=ClientLimits(), span=Span(num_requests=5))
    assert len(Play(Mixture((long,))).run().arrived) == 20


def test_what_was_not_answered_is_not_gone_on_with() -> None:
    assert len(Play(Mixture((TALK,)), failing=1.0).run().arrived) == 6


def test_what_is_said_does_not_depend_on_when() -> None:
    closed = replace(TALK, arrivals=ClosedArrivals(2, replace=True))
    prompts = [
        {name: request.prompt for name, request in Play(Mixture((s,))).run().requests.items()} for s in (TALK, closed)
    ]
    assert prompts[0] == prompts[1]


# --- Kinds of requests


def test_prompts_differ_from_their_first_tokens_on() -> None:
    found = [arrival.request.prompt for arrival in drawn(Stream(span=Span(num_requests=500)))]
    assert len({prompt[:4] for prompt in found if len(prompt) >= 4}) == sum(len(prompt) >= 4 for prompt in found)


def test_a_prompt_longer_than_the_tape() -> None:
    (arrival,) = drawn(
        Stream(lengths=DrawnSizes(Fixed(200_000), Fixed(1)), clients=ClientLimits(300_000), span=Span(1))
    )
    assert len(arrival.request.prompt) == 200_000


def test_what_is_longer_than_the_context_is_cut_and_said() -> None:
    stream = Stream(
        lengths=RecordedLengths(((90, 5), (96, 5), (10, 500), (50, 50))), clients=ClientLimits(100), span=Span(4)
    )
    found = drawn(stream)
    assert [arrival.is_cut for arrival in found] == [False, True, True, False]
    assert all(
        len(arrival.request.prompt) + min(arrival.length, arrival.request.max_tokens) <= 100 for arrival in found
    )
    load = Load(Mixture((stream,)), OWNERS, 1)
    for arrival in load.start(0.0):
        coming = [arrival]
        while coming:
            coming = load.arrived(coming[0].request.id)
    assert load.notes == ("request: 2 of its requests were cut to a context of 100 tokens",)


def test_lengths_are_drawn_from_a_file() -> None:
    pairs = read_trace(DATA / "sharegpt300.csv").pairs
    found = [
        (len(arrival.request.prompt), arrival.length)
        for arrival in drawn(Stream(lengths=Sampled(pairs), span=Span(num_requests=400)))
    ]
    assert set(found) <= set(pairs)
    assert len(set(found)) > 200


def test_short_and_long_prompts_have_their_shares() -> None:
    found = drawn(Stream(lengths=ShortLong(0.7, output=Fixed(5)), span=Span(num_requests=1000)))
    prompts = [len(arrival.request.prompt) for arrival in found]
    assert fmean(prompt < 1000 for prompt in prompts) == pytest.approx(0.7, abs=0.04)
    assert max(prompts) > 7500


@pytest.mark.parametrize(
    ("text", "least", "most", "mean"),
    [
        ("200", 200, 200, 200),
        ("512-1024", 512, 1024, 768),
        ("exp:60:4000", 0, 4000, 60),
        ("exp:60:80", 0, 80, 60 * (1 - 2.718281828 ** (-80 / 60))),
        ("lognormal:223:256:100000", 0, 100_000, 223),
        ("10@3|20-40", 10, 40, 15),
        ("10-512@34|513-4096@52|4097-8192@14", 10, 8192, 2247),
    ],
)
def test_amounts_are_as_they_are_written(text: str, least: float, most: float, mean: float) -> None:
    amount, draw = Amount.parse(text), Random(1)
    found = [amount.draw(draw) for _ in range(20_000)]
    assert least <= min(found) <= max(found) <= most
    assert fmean(found) == pytest.approx(mean, rel=0.05)


def test_promises_are_drawn_for_each_request() -> None:
    promise = StreamPromise(
        ServiceClass.BE, ttft_s=Fixed(2), tbt_s=Uniform(0.1, 0.2), slo_factor=Amount.parse("0.5|1|2")
    )
    found = [arrival.request for arrival in drawn(Stream(lengths=SMALL, promise=promise, span=Span(num_requests=200)))]
    assert {request.slo.ttft_s for request in found} == {1.0, 2.0, 4.0}
    assert all(
        0.05 <= request.slo.tbt_s <= 0.4 and request.slo.jct_s == 43_200 * request.slo.ttft_s for request in found
    )
    assert {request.service for request in found} == {ServiceClass.BE}


def test_without_a_word_a_promise_is_the_usual_one() -> None:
    assert drawn(Stream(lengths=SMALL, span=Span(1)))[0].request.slo == Slo()


def test_no_request_outgrows_the_context() -> None:
    stream = Stream(lengths=DrawnSizes(Uniform(1, 400), Uniform(1, 300)), span=Span(num_requests=300))
    for arrival in arrivals(Mixture((stream,)).within(200), OWNERS, 1, 0.0):
        assert arrival.request.most_tokens <= 200
        assert len(arrival.request.prompt) >= 1 <= arrival.request.max_tokens


def test_requests_of_a_stream_come_with_its_key() -> None:
    ann = Stream(name="a", lengths=SMALL, clients=ClientLimits(caller="ann"), span=Span(num_requests=3))
    found = drawn(ann, Stream(name="b", lengths=SMALL, span=Span(num_requests=3)))
    assert {(arrival.request.id[0], arrival.request.caller) for arrival in found} == {("a", "ann"), ("b", "")}


def test_some_ask_for_less_and_some_leave() -> None:
    clients = ClientLimits(max_tokens=50, limited_share=0.5, leaving_share=0.25, patience_s=2.0)
    found = drawn(Stream(lengths=SMALL, clients=clients, span=Span(num_requests=800)))
    assert fmean(arrival.request.max_tokens < 50 for arrival in found) == pytest.approx(0.5, abs=0.06)
    leaving = [arrival.leaves_after_s for arrival in found if arrival.leaves_after_s is not None]
    assert len(leaving) / 800 == pytest.approx(0.25, abs=0.05)
    assert fmean(leaving) == pytest.approx(2.0, rel=0.15)


def test_owners_take_turns() -> None:
    assert [arrival.request.owner for arrival in drawn(LOTS)] == ["gateway-0", "gateway-1"] * 2


def test_a_trace_has_no_conversations() -> None:
    with pytest.raises(WorkloadError, match="a trace has requests"):
        Stream(arrivals=Recorded((0.0, 1.0)), lengths=RecordedLengths(((1, 1), (2, 2))), turns=Turns(Fixed(2)))


# --- Through the whole system


@pytest.mark.parametrize("topology", ["colocated", "1+1"])
def test_lots_and_conversations_through_a_whole_deployment(topology: str) -> None:
    simulation = Simulation(Settings(topology=Topology.parse(topology), workload=Mixture((LOTS, TALK)), num_gateways=2))
    summary = summary_of(simulation)
    assert summary.problems == ()
    assert summary.num_finished == summary.num_requests > 14 + 6
    for name, client in simulation.clients.kept.items():
        earlier = simulation.clients.kept.get(name.removesuffix(".1")) if name.endswith(".1") else None
        if earlier is not None:
            said = (*earlier.request.prompt, *earlier.got)
            assert client.request.prompt[: len(said)] == said


def test_refused_lots_end() -> None:
    workload = Mixture((replace(LOTS, arrivals=ClosedArrivals(6)), Stream(lengths=SMALL, span=Span(num_requests=5))))
    summary = simulate(Settings(workload=workload, most_open=2))
    assert summary.problems == ()
    assert summary.num_refused > 0
    assert summary.num_requests == 14 + 5


def test_the_small_workload_is_one_poisson_stream() -> None:
    found = list(arrivals(Workload(num_requests=300, rate=50.0, limited_share=0.0), OWNERS, 3, 2.0))
    assert len(found) == 300
    assert found[-1].request.arrival_at - 2.0 == pytest.approx(6.0, rel=0.2)
    assert {arrival.request.max_tokens for arrival in found} == {100}
