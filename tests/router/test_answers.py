"""Memory for answers to their end: what chats will want is known ahead, and long answers before any has ended."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from math import exp

import pytest

from alignedserve.core import KEY_SALT_SIZE, Request, Retention, ServiceClass, Slo
from alignedserve.protocol.messages import Report
from alignedserve.router.placing.answers import AnswersAhead, OutputLengths, Shortage
from tests.samples import request

STEP_S, SLOW_S = 0.02, 0.05
NOW = 30.0
ON = "decode-0"


def chat(name: str, prompt: int = 1000, most: int = 2000) -> Request:
    return replace(request(name, prompt=prompt, max_tokens=most), service=ServiceClass.RT, slo=Slo())


def of_key(name: str) -> Request:
    return replace(chat("new"), salt=name.ljust(KEY_SALT_SIZE, "-"))


def ahead(*lengths: int, retention: Retention | None = None) -> AnswersAhead:
    """Return the chats of a worker whose steps take 20 ms, after outputs of these lengths."""
    found = AnswersAhead(256) if retention is None else AnswersAhead(256, retention)
    found.reported(ON, Report(step_s=STEP_S), 0.0)
    for length in lengths:
        found.ended(chat("ended"), length)
    return found


def wanted(found: AnswersAhead, new: Request, now: float, capacity: int = 0) -> float:
    """Return the most memory that the worker's chats and the new one will want at once."""
    return shortage(found, new, capacity, now).tokens + capacity


def shortage(
    found: AnswersAhead, new: Request, capacity: int, now: float, members: Mapping[str, float] | None = None
) -> Shortage:
    """Return what will lack on the worker when this chat comes."""
    found.asked(new, now)
    return found.shortage(new, members or {ON: 1.0}, capacity, capacity, now)


class TestWhatWillBeWanted:
    def test_all_that_decode_grow_by_a_token_in_each_step(self) -> None:
        """Ten chats have 500 of 1,000 tokens: when they end, the new one has 500 too."""
        found = ahead(*[1000] * 200)
        for number in range(10):
            found.put(ON, chat(f"c{number}"), decodes=True, now=0.0)
        assert wanted(found, chat("new"), 500 * STEP_S) == pytest.approx(10 * 2000 + 1500, rel=0.05)

    def test_chats_that_end_make_room_for_what_the_new_one_becomes(self) -> None:
        found = ahead(*[1000] * 200)
        found.put(ON, chat("old"), decodes=True, now=0.0)
        assert wanted(found, chat("new"), 900 * STEP_S) < 1900 + 1000 + 300

    def test_the_worst_moment_is_named(self) -> None:
        found = ahead(*[1000] * 200)
        found.put(ON, chat("old"), decodes=True, now=0.0)
        short = shortage(found, chat("new"), 3000, 500 * STEP_S)
        assert short.after_s == pytest.approx(500 * STEP_S, rel=0.15)

    def test_a_shortage_that_is_over_within_a_second_is_none(self) -> None:
        """Steps of a millisecond free what 1,000 of them fill before a chat would be missed."""
        for step_s, is_short in ((0.02, True), (0.001, False)):
            found = ahead(*[500] * 200)
            found.reported(ON, Report(step_s=step_s), 0.0)
            found.put(ON, chat("old"), decodes=True, now=0.0)
            short = shortage(found, chat("new"), 2500, 0.0)
            assert (short.tokens > 0) is is_short

    def test_a_chat_that_left_wants_nothing_and_one_that_waits_does_not_grow(self) -> None:
        found = ahead(*[1000] * 200)
        found.put(ON, chat("a"), decodes=True, now=0.0)
        found.put(ON, chat("b"), decodes=True, now=0.0)
        assert found.take(ON, "a", 400 * STEP_S) == pytest.approx(400)
        found.put("pool-0", chat("a"), decodes=False, now=400 * STEP_S, tokens=400.0)
        assert found.take("pool-0", "a", 900 * STEP_S) == 400.0
        assert found.take("pool-0", "a", 900 * STEP_S) is None

    def test_a_part_of_the_chats_of_a_pool_counts(self) -> None:
        found = ahead(*[1000] * 200)
        for number in range(4):
            found.put("pool-0", chat(f"c{number}"), decodes=False, now=0.0)
        all_of, half = (shortage(found, chat("new"), 0, 0.0, {ON: 1.0, "pool-0": part}).tokens for part in (1.0, 0.5))
        assert all_of - half == pytest.approx(2 * 2000, rel=0.1)

    def test_best_effort_requests_give_their_memory_to_chats(self) -> None:
        found = ahead()
        found.put(ON, replace(chat("d"), service=ServiceClass.BE), decodes=True, now=0.0)
        assert wanted(found, chat("new", most=1), 0.0, capacity=1001) <= 1001

    def test_nothing_lacks_where_the_longest_outputs_fit(self) -> None:
        found = ahead()
        found.put(ON, chat("a"), decodes=True, now=0.0)
        assert shortage(found, chat("new"), 6000, 0.0).tokens <= 0

    def test_chats_that_get_their_memory_at_once_want_all_that_they_may_need(self) -> None:
        found = AnswersAhead(256, grows=False)
        found.put(ON, chat("a"), decodes=True, now=0.0)
        assert shortage(found, chat("new"), 5000, 0.0).tokens == 1000

    def test_what_no_layer_reads_any_more_is_not_held(self) -> None:
        found = ahead(*[1000] * 200, retention=Retention(most=100))
        found.put(ON, chat("a"), decodes=True, now=0.0)
        assert wanted(found, chat("new"), 0.0) < 250

    def test_of_many_chats_some_stand_for_all(self) -> None:
        some, many = (ahead(*[1000] * 200) for _ in range(2))
        for number in range(128):
            some.put(ON, chat(f"c{number}"), decodes=True, now=0.0)
        for number in range(1280):
            many.put(ON, chat(f"c{number}"), decodes=True, now=0.0)
        assert wanted(many, chat("new"), 0.0) == pytest.approx(10 * wanted(some, chat("new"), 0.0), rel=0.1)


class TestHowLongOutputsGet:
    def test_long_ones_are_known_before_any_has_ended(self) -> None:
        """Twenty chats are through with 600 tokens each, and none has ended: they are not taken for short ones."""
        found = ahead()
        for number in range(20):
            found.put(ON, chat(f"c{number}"), decodes=True, now=0.0)
        at_first, later = (wanted(found, chat("new"), steps * STEP_S) for steps in (0, 600))
        held_then = 20 * 1600 + 1000
        assert at_first < 21 * 1100
        assert later > held_then + 500, "they are expected to go on"

    def test_at_a_start_whose_chats_all_go_on_there_is_no_room_for_one_more(self) -> None:
        """Thirty chats have 300 tokens each, none has ended, and 24,500 of 35,000 tokens of memory are held."""
        found = ahead()
        for number in range(30):
            found.put(ON, chat(f"c{number}", prompt=500, most=4000), decodes=True, now=0.0)
        new = chat("new", prompt=500, most=4000)
        assert shortage(found, new, 35_000, 10 * STEP_S).tokens < 0, "they may be short ones"
        assert shortage(found, new, 35_000, 300 * STEP_S).tokens > 0, "they are expected to go on"

    def test_without_an_end_they_are_not_expected_to_go_on_for_ever(self) -> None:
        """On average for 16 times as many tokens as the longest has, however many go on."""
        ends = OutputLengths(256).ends([300.0] * 1000, 1.0)
        assert ends.before(17 * 300) - ends.before(300) == pytest.approx(1.0, rel=0.01)

    def test_short_ones_free_their_memory_soon(self) -> None:
        found = ahead(*[100] * 200)
        for number in range(20):
            found.put(ON, chat(f"c{number}"), decodes=True, now=0.0)
        assert wanted(found, chat("new"), 0.0) < 21 * 1000 + 21 * 130

    def test_the_output_that_cannot_end_early_holds_all_of_it(self) -> None:
        exact = replace(chat("new", most=1500), stop_tokens=())
        assert wanted(ahead(*[10] * 200), exact, 0.0) > 1000 + 1400

    def test_a_share_ends_at_each_length_of_those_that_came_so_far(self) -> None:
        lengths = OutputLengths(256)
        for _ in range(500):
            lengths.add(100)
            lengths.add(1000)
        ends = lengths.ends([], 1.0)
        assert ends.before(90) == pytest.approx(0.0, abs=0.05)
        assert exp(-ends.before(900)) == pytest.approx(0.5, abs=0.05)
        assert ends.horizon == pytest.approx(1000, abs=50)

    def test_each_size_of_prompt_has_its_own(self) -> None:
        """Long prompts have short answers: of their memory there is room for another chat soon."""
        found = ahead()
        for _ in range(100):
            found.ended(chat("long", prompt=4000), 60)
            found.ended(chat("short", prompt=400), 1500)
        assert wanted(found, chat("new", prompt=4000), 0.0) < 4000 + 200
        assert wanted(found, chat("new", prompt=400), 0.0) > 400 + 1000

    def test_each_caller_has_its_own_and_a_new_one_has_those_of_all(self) -> None:
        found = ahead()
        for _ in range(100):
            found.ended(of_key("ann"), 1500)
            found.ended(of_key("bob"), 40)
        of = {caller: wanted(found, of_key(caller), 0.0) for caller in ("ann", "bob", "eve")}
        assert of["bob"] < of["eve"] < of["ann"]

    def test_a_thousand_callers_leave_no_more_than_some_kinds(self) -> None:
        found = ahead()
        for number in range(3000):
            new = of_key(f"c{number}")
            found.asked(new, number * STEP_S)
            found.ended(new, 100)
        assert len(pickle.dumps(found)) < 500_000

    def test_earlier_outputs_count_less_and_less(self) -> None:
        lengths = OutputLengths(256)
        for length in [50] * 512 + [1500] * 2048:
            lengths.add(length)
        assert lengths.ends([], 1.0).before(1400) < 0.1


class TestWhoGetsMemoryThatLacks:
    def asked(self, found: AnswersAhead, *chats: Request) -> None:
        """Let a chat of each come in turn, ten a second for half a minute."""
        for number in range(300):
            found.asked(chats[number % len(chats)], number / 10)

    def large_chats(self) -> AnswersAhead:
        """Return eleven with prompts of 1,000 tokens and outputs of 300, of which they have 100 to 300."""
        found = ahead()
        found.reported(ON, Report(step_s=SLOW_S), 0.0)
        for _ in range(100):
            found.ended(chat("large"), 300)
            found.ended(chat("small", prompt=100), 10)
        for number in range(11):
            found.put(ON, chat(f"c{number}"), decodes=True, now=NOW - SLOW_S * (300 - 20 * number))
        return found

    @pytest.mark.parametrize(("capacity", "is_short"), [(12_500, False), (9_000, True)])
    def test_a_small_chat_waits_for_memory_until_its_first_token_is_due(self, capacity: int, is_short: bool) -> None:
        """Of the large ones two end within a second."""
        found, small = self.large_chats(), chat("small", prompt=100)
        self.asked(found, chat("large"), small)
        assert (shortage(found, small, capacity, NOW).tokens > 0) is is_short
        assert shortage(found, chat("new"), capacity, NOW).tokens > 0, "for a large one there is none now"

    def test_where_all_are_alike_none_is_small(self) -> None:
        """They ask for more than there is: each that comes while memory lacks would take it from another."""
        found = self.large_chats()
        self.asked(found, chat("new"))
        assert shortage(found, chat("new"), 12_500, NOW).tokens > 0
        assert shortage(found, chat("new"), 16_000, NOW).tokens < 0
