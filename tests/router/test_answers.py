"""Memory for answers to their end: what chats will want is known ahead, and long answers before any has ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import KEEPS_ALL, Estimate, Request, Retention
from alignedserve.router.placing.answers import Answer, Shortage, shortage
from alignedserve.scheduling.policy import DEFAULT_POLICY
from tests.samples import request

STEP_S = 0.02


def chat(mean: int = 1000, prompt: int = 1000, most: int = 2000) -> Request:
    return replace(request("a", prompt=prompt, max_tokens=most), estimate=Estimate(mean, 2 * mean))


def exact(length: int, prompt: int = 1000) -> Request:
    return replace(chat(prompt=prompt, most=length), stop_tokens=())


def short(*answers: Answer, capacity: int = 0, retention: Retention = KEEPS_ALL) -> Shortage:
    return shortage(answers, capacity, STEP_S, DEFAULT_POLICY, retention)


def wanted(*answers: Answer, retention: Retention = KEEPS_ALL) -> float:
    """Return the most memory that these chats will want at once."""
    return short(*answers, retention=retention).tokens


class TestWhatWillBeWanted:
    def test_all_that_decode_grow_by_a_token_in_each_step(self) -> None:
        """Ten chats have 500 of 1,000 tokens: when they end, the new one has 500 too."""
        some = [Answer(exact(1000), 500.0)] * 10
        assert wanted(*some, Answer(exact(1000))) == pytest.approx(10 * 2000 + 1500, rel=0.05)

    def test_chats_that_end_make_room_for_what_the_new_one_becomes(self) -> None:
        assert wanted(Answer(exact(1000), 900.0), Answer(exact(1000))) == pytest.approx(1900 + 1000 + 100, abs=50)

    def test_the_worst_moment_is_named(self) -> None:
        found = short(Answer(exact(1000), 500.0), Answer(exact(1000)), capacity=3000)
        assert found.tokens == pytest.approx(500, abs=130)
        assert found.after_s == pytest.approx(500 * STEP_S, rel=0.15)

    @pytest.mark.parametrize(("step_s", "lacks"), [(0.02, True), (0.001, False)])
    def test_a_shortage_that_is_over_within_a_second_is_none(self, step_s: float, lacks: bool) -> None:
        """Steps of a millisecond free what 500 of them fill before a chat would be missed."""
        found = shortage([Answer(exact(500)), Answer(exact(500))], 2500, step_s, DEFAULT_POLICY, KEEPS_ALL)
        assert (found.tokens > 0) is lacks

    def test_a_part_of_a_chat_counts(self) -> None:
        some = [Answer(exact(1000), 0.0, part) for part in (1.0, 0.5)]
        assert wanted(some[0]) == pytest.approx(2 * wanted(some[1]))

    def test_what_no_layer_reads_any_more_is_not_held(self) -> None:
        assert wanted(Answer(exact(1000)), Answer(exact(1000)), retention=Retention(most=100)) == pytest.approx(200)

    def test_of_many_chats_some_stand_for_all(self) -> None:
        some, many = ([Answer(chat(), 100.0)] * number for number in (127, 1270))
        assert wanted(*many) == pytest.approx(10 * wanted(*some), rel=0.1)


class TestHowLongAnswersGet:
    def test_as_long_as_predicted_and_at_least_as_many_tokens_more_as_they_have(self) -> None:
        """Twenty chats are expected to get 100 tokens. Some are through with 600, and are not taken for short ones."""
        at_first, later = (wanted(*[Answer(chat(mean=100), tokens)] * 20) for tokens in (0.0, 600.0))
        assert at_first < 20 * 1100
        assert later > 20 * 1600 + 500

    def test_at_a_start_whose_chats_all_go_on_there_is_no_room_for_one_more(self) -> None:
        """Thirty chats have 500 tokens each, none has ended, and 30,000 of 31,500 tokens of memory are held."""
        new = replace(chat(prompt=500, most=4000), estimate=None)
        for tokens, lacks in ((10.0, False), (500.0, True)):
            found = short(*[Answer(new, tokens)] * 30, Answer(new), capacity=31_500)
            assert (found.tokens > 0) is lacks

    def test_short_ones_free_their_memory_soon(self) -> None:
        assert wanted(*[Answer(chat(mean=100))] * 20) < 20 * 1000 + 20 * 130

    def test_an_output_that_cannot_end_early_holds_all_of_it(self) -> None:
        assert wanted(Answer(exact(1500))) > 1000 + 1400 > wanted(Answer(chat(mean=10, most=1500))) + 1000
