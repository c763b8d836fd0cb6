"""Placement: the worker that runs a prompt, when decode workers help, and the decode worker it goes on to."""

from __future__ import annotations

from dataclasses import replace
from math import e
from typing import NamedTuple

import pytest

from alignedserve.core import CopyCost, Estimate, Request, Retention, Role, ServiceClass, Slo
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.messages import Backlog, Report
from alignedserve.router.placing.held import Beginnings, pieces_of
from alignedserve.router.placing.placement import Placement
from alignedserve.scheduling.policy import DEFAULT_POLICY, Handoff, Policy, Room
from tests.samples import member, request

POOL = {"local": "pool-0"}
TOKEN_S = 0.001
COPYING = CopyCost(TOKEN_S / 20)
NOW = 100.0


def rt(prompt: int = 100) -> Request:
    return replace(request("a", prompt=prompt, max_tokens=100), estimate=Estimate(50, 100))


def be(prompt: int = 100) -> Request:
    return replace(rt(prompt), service=ServiceClass.BE, slo=Slo(jct_s=600.0))


def placement(*workers: str, policy: Policy = DEFAULT_POLICY, prompts_on: Role = Role.PREFILL) -> Placement:
    found = Placement(policy, block_size=16, kv_tokens=1600, prompts_on=prompts_on)
    for name in workers:
        found.add_worker(member(name))
    return found


def tell(
    of: Placement, worker: str, all_s: float, rt_s: float = 0.0, free_blocks: int = 100, copying: CopyCost = COPYING
) -> None:
    of.progressed(worker, Backlog(all_s, TOKEN_S, rt_s, TOKEN_S, TOKEN_S, copying), free_blocks, NOW)


def place(of: Placement, worker: str, prompt: Request, now: float, takes_s: float | None = None) -> str:
    return of.placed(worker, prompt, len(prompt.prompt) * TOKEN_S if takes_s is None else takes_s, now)


class TestWhere:
    def test_a_chat_goes_where_chats_are_through_first_a_document_where_all_are(self) -> None:
        found = placement("prefill-0", "prefill-1")
        tell(found, "prefill-0", all_s=9.0, rt_s=0.1)
        tell(found, "prefill-1", all_s=1.0, rt_s=0.5)
        assert found.ahead_of(rt(), POOL, NOW).worker == "prefill-0"
        assert found.ahead_of(be(), POOL, NOW).worker == "prefill-1"

    def test_first_come_first_served_a_chat_waits_for_documents_too(self) -> None:
        found = placement("prefill-0", "prefill-1", policy=Policy(SchedulerName.FCFS))
        tell(found, "prefill-0", all_s=9.0, rt_s=0.1)
        tell(found, "prefill-1", all_s=1.0, rt_s=0.5)
        assert found.ahead_of(rt(), POOL, NOW).worker == "prefill-1"

    def test_what_was_placed_since_counts(self) -> None:
        found = placement("prefill-0", "prefill-1")
        tell(found, "prefill-0", all_s=0.0)
        tell(found, "prefill-1", all_s=0.05, rt_s=0.05)
        place(found, "prefill-0", rt(), NOW)
        found.add_request("prefill-0", rt(), NOW)
        assert found.ahead_of(rt(), POOL, NOW).worker == "prefill-1"
        assert found.ahead_of(rt(), POOL, NOW).prompts_s == pytest.approx(0.05)

    def test_colocated_decode_workers_run_prompts_with_and_without_a_pool(self) -> None:
        found = placement("decode-0", prompts_on=Role.DECODE)
        assert found.ahead_of(rt(), {}, NOW).worker == found.ahead_of(be(), POOL, NOW).worker == "decode-0"

    def test_where_prefill_workers_run_prompts_these_wait_for_one(self) -> None:
        found = placement("decode-0")
        assert not found.num_for_prompts
        assert found.ahead_of(rt(), {}, NOW).worker is found.ahead_of(rt(), POOL, NOW).worker is None

    def test_a_worker_that_is_lost_gets_nothing(self) -> None:
        found = placement("prefill-0", "prefill-1")
        found.remove_worker("prefill-0")
        assert found.ahead_of(rt(), POOL, NOW).worker == "prefill-1"


class TestTime:
    """The router takes the wait that a worker told to grow shorter as time passes."""

    def test_a_backlog_runs_off(self) -> None:
        found = placement("prefill-0")
        tell(found, "prefill-0", all_s=2.0, rt_s=2.0)
        waits = [found.ahead_of(rt(), POOL, NOW + seconds).prompts_s for seconds in (0.0, 1.5, 2.0, 60.0)]
        assert waits == pytest.approx([2.0, 0.5, 0.0, 0.0])
        assert found.least_wait_s(Role.PREFILL, ServiceClass.RT, NOW + 1.5) == pytest.approx(0.5)

    def test_what_is_placed_is_added_to_what_is_left(self) -> None:
        found = placement("prefill-0")
        tell(found, "prefill-0", all_s=2.0, rt_s=2.0)
        place(found, "prefill-0", rt(500), NOW + 1.5)
        assert found.ahead_of(rt(), POOL, NOW + 1.5).prompts_s == pytest.approx(1.0)
        place(found, "prefill-0", replace(rt(500), salt="unlike"), NOW + 60.0)
        assert found.ahead_of(rt(), POOL, NOW + 60.0).prompts_s == pytest.approx(0.5)

    def test_a_worker_that_will_be_through_is_as_good_as_an_idle_one(self) -> None:
        """It holds 170 tokens less: that counts as 43 tokens of a prompt."""
        found = placement("prefill-0", "prefill-1")
        found.add_request("prefill-1", rt(), NOW)
        tell(found, "prefill-0", all_s=2.0, rt_s=2.0)
        tell(found, "prefill-1", all_s=0.0)
        assert found.ahead_of(rt(), POOL, NOW).worker == "prefill-1"
        assert found.ahead_of(rt(), POOL, NOW + 1.95).worker == "prefill-1"
        assert found.ahead_of(rt(), POOL, NOW + 1.96).worker == "prefill-0"

    def test_others_beside_it_slow_a_prompt_down(self) -> None:
        """The time that the prompt takes longer than alone is a wait for others; its own time is that of the model."""
        found = placement("prefill-0")
        found.progressed("prefill-0", Backlog(0.5, TOKEN_S, 0.5, 3 * TOKEN_S, 2 * TOKEN_S), 100, NOW)
        ahead = found.ahead_of(rt(1000), POOL, NOW)
        assert (ahead.prompts_s, ahead.prompt_s, ahead.token_s) == pytest.approx((0.5 + 1.0, 1.0, TOKEN_S))
        assert found.ahead_of(be(1000), POOL, NOW).prompts_s == pytest.approx(0.5 + 2.0)

    def test_an_idle_worker_is_taken_to_be_slow_for_some_seconds_only(self) -> None:
        """It tells nothing more, so a chat that the router refuses would be refused for ever."""
        found = placement("prefill-0")
        found.progressed("prefill-0", Backlog(0.5, TOKEN_S, 0.5, 3 * TOKEN_S, 2 * TOKEN_S), 100, NOW)
        waits = [found.ahead_of(rt(1000), POOL, NOW + 0.5 + seconds).prompts_s for seconds in (0.0, 4.0, 60.0)]
        assert waits == pytest.approx([1.0, 1.0 / e, 0.0], abs=1e-6)

    def test_a_prompt_that_is_placed_does_not_make_it_slow_again(self) -> None:
        found = placement("prefill-0")
        found.progressed("prefill-0", Backlog(0.0, TOKEN_S, 0.0, 3 * TOKEN_S, 2 * TOKEN_S), 100, NOW)
        place(found, "prefill-0", replace(rt(100), salt="unlike"), NOW + 60.0)
        assert found.ahead_of(rt(1000), POOL, NOW + 60.0).prompts_s == pytest.approx(0.1, rel=1e-3)


class TestMemoryOfAWorker:
    """A worker that decodes too needs memory for its requests.

    An output here counts with 70 tokens while it is open, so a request needs 170 tokens if it is alone there.
    """

    def colocated(self, kv_tokens: int = 450) -> Placement:
        found = Placement(DEFAULT_POLICY, block_size=16, kv_tokens=kv_tokens, prompts_on=Role.DECODE)
        for name in ("decode-0", "decode-1"):
            found.add_worker(member(name))
        return found

    def named(self, name: str, upper: int = 100) -> Request:
        return replace(rt(), id=name, max_tokens=5000, estimate=Estimate(min(50, upper), upper))

    def test_of_idle_workers_the_worker_whose_requests_hold_least(self) -> None:
        found = self.colocated()
        found.add_request("decode-0", self.named("a", upper=300), NOW)
        for name in "bc":
            found.add_request("decode-1", self.named(name, upper=10), NOW)
        assert found.ahead_of(self.named("new"), {}, NOW).worker == "decode-1", (
            "two short ones hold less than a long one"
        )

    @pytest.mark.parametrize(("prompts_on", "short"), [(Role.DECODE, True), (Role.PREFILL, False)])
    def test_answers_to_come_count_on_the_worker_or_on_all_where_they_may_go_on_to_any(
        self, prompts_on: Role, short: bool
    ) -> None:
        """Three chats of decode-0 have come to 200 of 5,000 tokens; decode-1 is empty, and has prompts to run."""
        found = Placement(DEFAULT_POLICY, block_size=16, kv_tokens=1100, prompts_on=prompts_on)
        for name in ("prefill-0", "decode-0", "decode-1"):
            found.add_worker(member(name))
        tell(found, "decode-1", all_s=99.0, rt_s=99.0)
        found.reported("decode-0", Report(step_s=0.05), NOW)
        for number in range(3):
            found.add_request("decode-0", self.named(f"a{number}"), NOW)
        later = NOW + 10.0
        assert (found.ahead_of(self.named("new"), {}, later).shortage.tokens > 0) is short
        found.remove_request("decode-0", self.named("a0"))
        assert found.ahead_of(self.named("new"), {}, later).shortage.tokens < 0

    @pytest.mark.parametrize(("room", "lacks"), [(Room.GROWING, False), (Room.WHOLE, True)])
    def test_chats_that_get_their_memory_at_once_want_all_that_they_may_need(self, room: Room, lacks: bool) -> None:
        found = placement("decode-0", policy=Policy(room=room), prompts_on=Role.DECODE)
        for number, is_short in ((0, False), (1, False), (2, False), (3, lacks)):
            chat = replace(rt(301), id=f"a{number}", estimate=Estimate(2, 4))
            assert (found.ahead_of(chat, {}, NOW).shortage.tokens > 0) is is_short
            found.add_request("decode-0", chat, NOW)

    def test_nothing_lacks_where_nobody_knows_how_much_a_device_holds(self) -> None:
        found = self.colocated(kv_tokens=0)
        for worker in ("decode-0", "decode-1"):
            found.add_request(worker, self.named(worker), NOW)
        assert found.ahead_of(self.named("new"), {}, NOW).shortage.tokens < 0


class Told(NamedTuple):
    """What a worker told last: the time of all its prompts, and of chats', and its free blocks."""

    all_s: float = 0.0
    rt_s: float = 0.0
    free_blocks: int = 100


PILED_UP, IDLE = Told(10.0, 0.6), Told()


def lending(*workers: str) -> Placement:
    """Return prefill workers that decode, too, and decode workers, all idle."""
    found = Placement(DEFAULT_POLICY, block_size=16, kv_tokens=1600, lends=True)
    for name in workers or ("prefill-0", "decode-0"):
        found.add_worker(replace(member(name), role=Role.DECODE, lends=name.startswith("prefill")))
        tell(found, name, all_s=0.0)
    return found


class TestHelp:
    """A chat's prompt of 100 tokens takes 0.1 s and 7 blocks; its ttft is a second."""

    @pytest.mark.parametrize(
        ("prefill", "decode", "new", "goes_to"),
        [
            (PILED_UP, IDLE, rt(), "decode-0"),
            (PILED_UP, IDLE, be(), "prefill-0"),  # chats would wait in the pool for a worker that runs documents
            (PILED_UP, Told(free_blocks=7), rt(), "decode-0"),
            (PILED_UP, Told(free_blocks=6), rt(), "prefill-0"),
            (Told(1.9, 0.14), IDLE, rt(), "prefill-0"),  # less than a quarter of the ttft
            (Told(1.9, 0.16), IDLE, rt(), "decode-0"),
            (Told(1.9, 0.14), IDLE, rt(300), "decode-0"),
            (PILED_UP, Told(0.7, 0.7), rt(), "prefill-0"),  # it would come later there
            (PILED_UP, Told(0.5, 0.5), rt(), "decode-0"),
        ],
    )
    def test_prompts_that_pile_up_go_to_a_decode_worker(
        self, prefill: Told, decode: Told, new: Request, goes_to: str
    ) -> None:
        found = placement("prefill-0", "decode-0")
        tell(found, "prefill-0", *prefill)
        tell(found, "decode-0", *decode)
        assert found.ahead_of(new, POOL, NOW).worker == goes_to
        found.add_request("pool-0", rt(), NOW)
        assert found.ahead_of(new, POOL, NOW).worker == goes_to, "what is in the pool is none of its room"

    @pytest.mark.parametrize(
        ("prefill", "decode", "new", "goes_to"),
        [
            (IDLE, IDLE, rt(), "prefill-0"),
            (IDLE, IDLE, be(), "prefill-0"),
            (Told(0.5, 0.1), IDLE, rt(), "prefill-0"),
            (Told(0.5, 0.2), IDLE, rt(), "decode-0"),
            (Told(0.1), IDLE, be(), "decode-0"),  # it takes documents as any other
            (Told(free_blocks=7), IDLE, rt(), "prefill-0"),
            (Told(free_blocks=6), IDLE, rt(), "decode-0"),  # the chat would wait for memory
            (Told(free_blocks=6), IDLE, be(), "prefill-0"),
            (Told(free_blocks=6), Told(free_blocks=6), rt(), "prefill-0"),
        ],
    )
    def test_where_prefill_workers_decode_too_so_do_those_that_lack_memory(
        self, prefill: Told, decode: Told, new: Request, goes_to: str
    ) -> None:
        found = lending()
        found.add_request("decode-0", replace(rt(), id="other"), NOW)
        tell(found, "prefill-0", *prefill)
        tell(found, "decode-0", *decode)
        assert found.ahead_of(new, POOL, NOW).worker == goes_to

    def test_it_can_be_turned_off(self) -> None:
        found = placement("prefill-0", "decode-0", policy=Policy(helps=False))
        tell(found, "prefill-0", *PILED_UP)
        tell(found, "decode-0", *IDLE)
        assert found.ahead_of(rt(), POOL, NOW).worker == "prefill-0"


class TestLending:
    """Prefill workers decode, too: requests go on to a decode worker where that is worth it."""

    def test_the_memory_of_both_counts(self) -> None:
        found = lending()
        assert found.memory == 2 * 1600
        assert (found.num_workers(Role.PREFILL), found.num_workers(Role.DECODE)) == (1, 1)

    def test_a_request_goes_on_to_a_decode_worker_with_room_for_all_of_it(self) -> None:
        found, long = lending(), replace(rt(), max_tokens=100, estimate=Estimate(80, 100))
        tell(found, "decode-0", all_s=0.0, free_blocks=13)
        assert place(found, "prefill-0", long, NOW) == "decode-0"
        tell(found, "decode-0", all_s=0.0, free_blocks=12)
        assert place(found, "prefill-0", long, NOW) == ""

    def test_a_short_one_stays(self) -> None:
        short = replace(rt(), estimate=Estimate(15, 100))
        assert place(lending(), "prefill-0", short, NOW) == ""
        assert place(lending(), "prefill-0", replace(short, estimate=Estimate(16, 100)), NOW) == "decode-0"

    def test_a_chat_stays_whose_second_token_would_be_late(self) -> None:
        """Two copies take 5 ms each for 100 tokens, and there are three steps of 10 ms on the way."""
        found = lending()
        found.reported("decode-0", Report(free_blocks=100, step_s=0.01), NOW)
        for tbt_s, where in ((0.041, "decode-0"), (0.039, "")):
            assert place(found, "prefill-0", replace(rt(), slo=Slo(tbt_s=tbt_s)), NOW) == where

    def test_none_goes_on_to_a_worker_that_runs_prompts(self) -> None:
        found = lending()
        tell(found, "decode-0", all_s=0.1)
        assert place(found, "prefill-0", replace(rt(), estimate=Estimate(80, 100)), NOW) == ""

    def test_nor_to_one_that_ran_prompts_for_much_of_the_last_seconds(self) -> None:
        found, long = lending(), replace(rt(), estimate=Estimate(80, 100))
        for at in (NOW - 0.5, NOW):
            assert place(found, "decode-0", rt(), at, takes_s=0.5) == ""
        tell(found, "decode-0", all_s=0.0)
        assert place(found, "prefill-0", long, NOW + 3.0) == ""
        assert place(found, "prefill-0", long, NOW + 3.5) == "decode-0"

    @pytest.mark.parametrize("left", ["prefill-0", "decode-0"])
    def test_whichever_is_left_does_all(self, left: str) -> None:
        found = lending()
        found.remove_worker("decode-0" if left == "prefill-0" else "prefill-0")
        assert found.num_for_prompts == 1
        assert found.ahead_of(rt(), POOL, NOW).worker == found.ahead_of(be(), POOL, NOW).worker == left
        assert place(found, left, replace(rt(), estimate=Estimate(80, 100)), NOW) == ""
        assert found.memory == 1600
        assert not found.decodes_only_elsewhere("local")


class TestBands:
    """With batches by length a request goes on to a decode worker whose batch has lengths like its own."""

    def reported(self, **bands: tuple[int, int] | None) -> Placement:
        found = placement("prefill-0", policy=Policy(handoff=Handoff.POOL, helps=False))
        for name, band in bands.items():
            found.add_worker(replace(member("decode-0"), name=name))
            found.reported(name, Report(band=band, free_blocks=100), NOW)
        return found

    @pytest.mark.parametrize(("prompt", "goes_to"), [(100, "short"), (480, "short"), (500, "long"), (9000, "long")])
    def test_the_nearest_band_is_named(self, prompt: int, goes_to: str) -> None:
        found = self.reported(short=(50, 80), long=(900, 1500))
        for name in ("short", "long"):
            found.note_room(name, 1000)
        assert place(found, "prefill-0", rt(prompt), NOW) == goes_to

    def test_only_with_room_for_what_it_may_grow_to(self) -> None:
        found = self.reported(short=(50, 80), long=(900, 1500))
        for free, goes_to in ((13, "short"), (12, "long")):
            found.note_room("short", free)
            assert place(found, "prefill-0", rt(), NOW) == goes_to

    @pytest.mark.parametrize(("one", "other"), [((50, 200), (60, 190)), (None, None)])
    def test_of_equals_the_worker_with_most_room(
        self, one: tuple[int, int] | None, other: tuple[int, int] | None
    ) -> None:
        found = self.reported(one=one, other=other)
        for free, goes_to in ((99, "other"), (101, "one")):
            found.note_room("one", free)
            found.note_room("other", 100)
            assert place(found, "prefill-0", rt(), NOW) == goes_to


class TestRoom:
    """A request goes on to the decode worker with most room: what it told last, less what was sent there since."""

    def test_what_was_sent_there_counts_until_it_tells_again(self) -> None:
        found = placement("prefill-0", "decode-0", "decode-1")
        assert place(found, "prefill-0", rt(), NOW) == "", "no worker has told yet"
        found.note_room("decode-0", 20)
        found.note_room("decode-1", 25)
        assert [place(found, "prefill-0", rt(), NOW) for _ in range(4)] == [f"decode-{at}" for at in (1, 0, 1, 0)]
        found.note_room("decode-0", 20)
        assert place(found, "prefill-0", rt(), NOW) == "decode-0"

    @pytest.mark.parametrize(("most", "goes_to"), [(15, "decode-0"), (16, "decode-1")])
    def test_a_long_request_takes_what_it_holds_at_once(self, most: int, goes_to: str) -> None:
        """Of a thousand tokens it holds 15 or 16: a block or two."""
        found = Placement(DEFAULT_POLICY, 16, 1600, retention=Retention(most))
        for name, free in (("prefill-0", 0), ("decode-0", 11), ("decode-1", 10)):
            found.add_worker(member(name))
            found.note_room(name, free)
        assert [place(found, "prefill-0", rt(1000), NOW) for _ in range(2)] == ["decode-0", goes_to]

    def test_chats_find_what_documents_hold_or_were_sent_for(self) -> None:
        """Chats were refused for lack of memory that documents would have given them, or that was to be documents'."""
        found = placement("prefill-0", "decode-0")
        tell(found, "prefill-0", all_s=10.0, rt_s=0.6)
        found.reported("decode-0", Report(free_blocks=5, given_blocks=2), NOW)
        assert found.ahead_of(rt(), POOL, NOW).worker == "decode-0"
        assert place(found, "prefill-0", be(), NOW) == "decode-0"
        assert found.ahead_of(rt(), POOL, NOW).worker == "decode-0"
        assert place(found, "prefill-0", rt(), NOW) == "decode-0"
        assert found.ahead_of(rt(), POOL, NOW).worker == "prefill-0"


class TestNodes:
    def two(self) -> Placement:
        """Return two nodes with a prefill worker and a decode worker each, and prefill-2 on a third node."""
        found = Placement(DEFAULT_POLICY, block_size=16, kv_tokens=1600)
        for number in range(3):
            found.add_worker(replace(member(f"prefill-{number}"), node=f"n{number}"))
        for number in range(2):
            found.add_worker(replace(member(f"decode-{number}"), node=f"n{number}"))
            tell(found, f"decode-{number}", all_s=0.0, free_blocks=100 - number)
        return found

    def test_memory_of_workers_that_have_just_started_is_not_known(self) -> None:
        """A decode worker that comes back has told nothing yet: its memory counted as missing without end, and every
        chat was refused."""
        found = self.two()
        for number in range(2):
            found.remove_worker(f"decode-{number}")
        found.add_worker(replace(member("decode-0"), node="n0"))
        assert found.ahead_of(rt(), POOL, NOW).shortage.tokens < 0

    def test_a_prompt_stays_on_its_node_while_there_is_room(self) -> None:
        found = self.two()
        assert [place(found, f"prefill-{number}", rt(), NOW) for number in (1, 1, 0)] == [
            "decode-1",
            "decode-1",
            "decode-0",
        ]
        tell(found, "decode-1", all_s=0.0, free_blocks=3)
        assert place(found, "prefill-1", rt(), NOW) == "decode-0"

    def test_from_a_node_without_decode_workers_it_goes_where_most_room_is(self) -> None:
        found = self.two()
        assert place(found, "prefill-2", rt(), NOW) == "decode-0"
        assert place(found, "prefill-2", rt(), NOW) == "decode-1"
        found.remove_worker("decode-1")
        assert place(found, "prefill-2", rt(), NOW) == "decode-0"
        found.remove_worker("decode-0")
        assert place(found, "prefill-2", rt(), NOW) == ""

    def test_another_life_may_be_on_another_node(self) -> None:
        found = self.two()
        found.add_worker(replace(member("decode-1"), node="n2"))
        tell(found, "decode-1", all_s=0.0, free_blocks=50)
        assert place(found, "prefill-2", rt(), NOW) == "decode-1"
        assert place(found, "prefill-1", rt(), NOW) == "decode-0"


POOLS = {"n0": "pool-0", "n1": "pool-1"}


class TestBeginnings:
    """Several nodes have a pool, and one of them has the beginning of a prompt; to copy it takes a 20th of the time."""

    def two(self, policy: Policy = DEFAULT_POLICY) -> Placement:
        found = Placement(policy, block_size=16, kv_tokens=16_000)
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            found.add_worker(replace(member(name), node=f"n{name[-1]}"))
            busy_s = 99.0 * name.startswith("decode")
            tell(found, name, all_s=busy_s, rt_s=busy_s, free_blocks=1000)
        found.note_prefix(rt(600), "n1", POOLS)  # four pieces of 128 tokens
        tell(found, "prefill-1", all_s=0.2, rt_s=0.2)
        return found

    def test_it_goes_where_its_first_token_comes_first(self) -> None:
        found = self.two()
        assert found.ahead_of(rt(1000), POOLS, NOW).worker == "prefill-1", "0.2 s for others, and 0.51 s"
        assert found.ahead_of(rt(120), POOLS, NOW).worker == "prefill-0", "no whole piece"
        tell(found, "prefill-1", all_s=0.6, rt_s=0.6)
        assert found.ahead_of(rt(1000), POOLS, NOW).worker == "prefill-0"

    def test_it_is_expected_to_take_what_is_not_known(self) -> None:
        assert self.two().ahead_of(rt(1000), POOLS, NOW).prompt_s == pytest.approx(0.488 + 0.05 * 0.512)

    def test_so_is_what_comes_after_it(self) -> None:
        found = self.two()
        tell(found, "prefill-0", all_s=9.0, rt_s=9.0)
        place(found, "prefill-1", rt(500), NOW, 0.5 - 0.95 * 0.384)
        found.add_request("prefill-1", rt(), NOW)
        assert found.ahead_of(rt(1000), POOLS, NOW).prompts_s == pytest.approx(0.2 + 0.5 - 0.95 * 0.384)

    @pytest.mark.parametrize(
        ("copy_share", "takes_s"), [(0.05, 0.192 + 0.05 * 7.808), (0.9, 0.192 + 0.9 * 7.808), (2.0, 8.0)]
    )
    def test_a_copy_takes_what_the_worker_says(self, copy_share: float, takes_s: float) -> None:
        """The worker computes a prompt if a copy takes longer."""
        found = self.two()
        found.note_prefix(rt(7900), "n1", POOLS)
        tell(found, "prefill-0", all_s=9.0, rt_s=9.0)
        tell(found, "prefill-1", all_s=0.0, copying=CopyCost(copy_share * TOKEN_S))
        assert found.ahead_of(rt(8000), POOLS, NOW).prompt_s == pytest.approx(takes_s)

    @pytest.mark.parametrize(("wait_s", "goes_to"), [(0.7, "prefill-1"), (0.9, "prefill-0")])
    def test_a_prompt_behind_a_slow_link_goes_where_it_is_sooner(self, wait_s: float, goes_to: str) -> None:
        """The copy of 7,808 tokens takes 7 s; the worker would compute them in 7.8 s."""
        found = self.two()
        found.note_prefix(rt(7900), "n1", POOLS)
        tell(found, "prefill-1", all_s=wait_s, rt_s=wait_s, copying=CopyCost(0.9 * TOKEN_S))
        assert found.ahead_of(rt(8000), POOLS, NOW).worker == goes_to

    def test_another_salt_is_another_beginning(self) -> None:
        assert self.two().ahead_of(replace(rt(1000), salt="other"), POOLS, NOW).worker == "prefill-0"

    def test_not_where_its_pool_is_gone(self) -> None:
        found = self.two()
        found.forget_kv("pool-1")
        assert found.ahead_of(rt(1000), POOLS, NOW).worker == "prefill-0"

    def test_nor_where_prompts_are_not_reused(self) -> None:
        assert self.two(Policy(reuse=False)).ahead_of(rt(1000), POOLS, NOW).worker == "prefill-0"

    def test_nor_where_no_worker_runs_it(self) -> None:
        found = self.two()
        found.remove_worker("prefill-1")
        assert found.ahead_of(rt(1000), POOLS, NOW).worker == "prefill-0"

    def test_what_begins_so_and_goes_on_otherwise_is_known_as_far_as_that(self) -> None:
        known, request = Beginnings(), rt(1000)
        pieces = pieces_of(request)
        known.came(pieces, "n0")
        known.came(pieces_of(replace(request, prompt=request.prompt[:300] + (7,) * 700)), "n1")
        assert known.tokens_at(pieces) == {"n0": 896, "n1": 256}
        known.forget("n0")
        assert known.tokens_at(pieces) == {"n1": 256}

    def test_what_is_remembered_is_bounded_and_the_oldest_leaves(self) -> None:
        known = Beginnings(most=4)
        for number in range(5):
            known.came(pieces_of(replace(rt(), prompt=(number,) * 150)), "n0")
        assert len(known) == 4
        assert not known.tokens_at(pieces_of(replace(rt(), prompt=(0,) * 150)))
        assert known.tokens_at(pieces_of(replace(rt(), prompt=(4,) * 150)))


class TestDevices:
    """A worker has the beginning of a prompt on its device, where others began so."""

    def two(self, policy: Policy = DEFAULT_POLICY) -> Placement:
        found = Placement(policy, block_size=16, kv_tokens=16_000, prompts_on=Role.DECODE)
        for name in ("decode-0", "decode-1"):
            found.add_worker(member(name))
            tell(found, name, all_s=0.0, free_blocks=1000)
        place(found, "decode-1", rt(600), NOW)
        tell(found, "decode-1", all_s=0.0)
        return found

    def test_it_goes_to_that_worker_unless_another_is_through_earlier(self) -> None:
        found = self.two()
        tell(found, "decode-1", all_s=0.4, rt_s=0.4)
        assert found.ahead_of(rt(1000), POOL, NOW).worker == "decode-1", (
            "0.4 s for others, 0.512 s that it need not compute"
        )
        tell(found, "decode-1", all_s=0.6, rt_s=0.6)
        assert found.ahead_of(rt(1000), POOL, NOW).worker == "decode-0"

    def test_to_copy_what_the_node_s_pool_has_takes_some_time(self) -> None:
        found = self.two()
        found.note_prefix(rt(600), "local", POOL)
        assert found.ahead_of(rt(1000), POOL, NOW).worker == "decode-1", "nothing is to be copied there"
        tell(found, "decode-1", all_s=0.1, rt_s=0.1)
        assert found.ahead_of(rt(1000), POOL, NOW).worker == "decode-0"

    @pytest.mark.parametrize(("num_more", "goes_to"), [(1, "decode-1"), (4, "decode-0")])
    def test_a_worker_that_holds_much_more_than_others_gets_no_more_of_them(self, num_more: int, goes_to: str) -> None:
        """It may hold four tokens more for each of the 512 that it need not compute."""
        found = self.two()
        for number in range(num_more):
            found.add_request("decode-1", replace(rt(1000), id=f"here-{number}"), NOW)
        assert found.ahead_of(rt(1000), POOL, NOW).worker == goes_to

    def test_a_worker_that_has_started_again_has_nothing(self) -> None:
        found = self.two()
        found.forget_kv("decode-1")
        tell(found, "decode-1", all_s=0.1, rt_s=0.1)
        assert found.ahead_of(rt(1000), POOL, NOW).worker == "decode-0"
