"""What an owner saw of its requests in the last minutes and hours, in bounded memory."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.core import ServiceClass, TokenTimes
from alignedserve.metrics.recent import (
    MOST_OF_REASON,
    MOST_SLOWEST,
    NUM_SLOTS,
    SLOT_S,
    SLOTS_S,
    WINDOW_S,
    Counts,
    EndedRequest,
    KeyUse,
    RecentRequests,
    RefusedRequest,
    RequestLog,
    Slot,
    bucket_of,
    together,
)

RT, BE = ServiceClass.RT, ServiceClass.BE
ENDED = EndedRequest("a", RT, "default", 5.0, "", TokenTimes(0.2, 19, 0, 0.1, 2.0), prompt_tokens=30, output_tokens=20)
REFUSED = RefusedRequest("b", BE, "default", 5.0, "queue_full", "the queue is full")


def took(all_s: float) -> TokenTimes:
    return replace(ENDED.times, all_s=all_s)


def test_tokens_count_in_the_slot_in_which_they_are_seen() -> None:
    log = RequestLog()
    log.tokens[RT].num += 7
    log.tick(1.0)
    log.tokens[RT].num += 2
    log.tokens[BE].num += 4
    log.tick(SLOT_S + 1.0)
    assert log.recent(2 * SLOT_S).slots == (
        Slot(0, Counts(tokens=7)),
        Slot(1, Counts(tokens=2), Counts(tokens=4)),
    )


def test_the_slot_that_is_not_over_is_not_shown() -> None:
    log = RequestLog()
    log.end(ENDED)
    assert log.recent(SLOT_S - 0.1).slots == ()
    (slot,) = log.recent(SLOT_S).slots
    assert (slot.number, slot.rt.ended, slot.rt.kept, slot.be) == (0, 1, 1, Counts())


def test_ends_and_refusals_are_counted_by_class() -> None:
    log = RequestLog()
    log.end(ENDED)
    log.end(replace(ENDED, missed="ttft"))
    log.refuse(REFUSED)
    (slot,) = log.recent(SLOT_S).slots
    assert (slot.rt.ended, slot.rt.kept, slot.rt.missed) == (2, 1, {"ttft": 1})
    assert slot.be == Counts(asked=1, refused=1, missed={"queue_full": 1})


def test_no_promise_counts_for_who_asked_for_none() -> None:
    log = RequestLog()
    for ended in (ENDED, replace(ENDED, is_asked=False)):
        log.end(ended)
    for refused in (REFUSED, replace(REFUSED, is_asked=False)):
        log.refuse(replace(refused, service=RT))
    (slot,) = log.recent(SLOT_S).slots
    assert (slot.rt.asked, slot.rt.kept, slot.rt.ended, slot.rt.refused) == (2, 1, 2, 2)


def test_what_each_class_used_is_added_up() -> None:
    log = RequestLog()
    for at in (5.0, 6.0, 5.0 + SLOT_S):
        log.end(replace(ENDED, at=at, service=BE, device_s=0.5, joules=20.0))
    slots = together((log.recent(2 * SLOT_S),) * 2).slots
    assert [(slot.be.device_s, slot.be.joules, slot.rt) for slot in slots] == [
        (2.0, 80.0, Counts()),
        (1.0, 40.0, Counts()),
    ]


def test_latencies_are_counted_in_buckets_that_end_within_a_quarter() -> None:
    log = RequestLog()
    log.end(replace(ENDED, waited_s=0.05, cached_tokens=12))
    log.end(replace(ENDED, times=replace(ENDED.times, ttft_s=0.2)))
    log.tokens[RT].add_gap(0.03)
    log.tick(5.0)
    (slot,) = log.recent(SLOT_S).slots
    assert (slot.rt.prompt_tokens, slot.rt.cached_tokens) == (60, 12)
    assert (sum(slot.rt.ttft.values()), sum(slot.rt.waits.values()), sum(slot.rt.gaps.values())) == (2, 1, 1)
    for seconds, spread in ((0.2, slot.rt.ttft), (0.05, slot.rt.waits), (0.03, slot.rt.gaps)):
        (bucket,) = spread
        assert seconds <= 0.001 * 1.25**bucket < 1.25 * seconds
    assert bucket_of(0.0) == bucket_of(0.001) == 0


def test_what_each_key_used_is_added_up_over_slots_and_owners() -> None:
    log = RequestLog()
    log.end(replace(ENDED, key="ann"))
    log.end(replace(ENDED, key="ann", at=5.0 + SLOT_S, missed="ttft"))
    log.refuse(replace(REFUSED, key="bob", at=5.0 + SLOT_S))
    used = log.recent(2 * SLOT_S)
    assert used.keys == (KeyUse("ann", 2, 1, 0, 60, 40), KeyUse("bob", refused=1))
    assert together((used, used)).keys == (KeyUse("ann", 4, 2, 0, 120, 80), KeyUse("bob", refused=2))


def test_the_slowest_come_first_and_they_are_few() -> None:
    log = RequestLog()
    for number in range(3 * MOST_SLOWEST):
        log.end(replace(ENDED, id=str(number), at=5.0 + number, times=took(float(number))))
    slowest = log.recent(40.0).slowest
    assert [ended.id for ended in slowest] == [str(3 * MOST_SLOWEST - 1 - place) for place in range(MOST_SLOWEST)]


def test_documents_that_take_long_do_not_hide_slow_chats() -> None:
    log = RequestLog()
    log.end(replace(ENDED, times=took(9.0)))
    for number in range(3 * MOST_SLOWEST):
        log.end(replace(ENDED, id=str(number), service=BE, times=took(100.0 + number)))
    slowest = log.recent(6.0).slowest
    assert [ended.service for ended in slowest] == [RT, *[BE] * MOST_SLOWEST]


def test_the_newest_refusals_of_each_reason_come_first_and_they_are_few_and_short() -> None:
    log = RequestLog()
    log.refuse(replace(REFUSED, id="rare", reason="too_late"))
    for number in range(50):
        log.refuse(replace(REFUSED, id=str(number), at=6.0 + number, why="x" * 10_000))
    refused = log.recent(60.0).refused
    assert [request.id for request in refused] == [*(str(49 - place) for place in range(MOST_OF_REASON)), "rare"]
    assert all(len(request.why) < 1000 for request in refused)
    assert together((log.recent(60.0), log.recent(60.0))).refused[-2:] == (refused[-1],) * 2


def test_a_request_that_missed_its_promise_is_named_though_others_were_slower() -> None:
    log = RequestLog()
    for number in range(3 * MOST_SLOWEST):
        log.end(replace(ENDED, id=str(number), times=took(100.0 + number)))
    late = replace(ENDED, id="late", missed="ttft", at=8.0)
    log.end(late)
    assert late not in log.recent(9.0).slowest
    assert log.recent(9.0).missed == (late,)
    assert log.recent(9.0 + WINDOW_S).missed == ()
    assert log.recent(9.0 + WINDOW_S, SLOTS_S[1]).missed == (late,)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    log = RequestLog()
    log.end(ENDED)
    log.refuse(REFUSED)
    log.tokens[RT].num += 3
    assert log.recent(5.0 + WINDOW_S - 1).slowest == (ENDED,)
    later = log.recent(5.0 + WINDOW_S + 2 * SLOT_S)
    assert (later.slowest, later.refused, later.slots) == ((), (), (Slot(90, Counts(tokens=3)),))


def test_a_long_life_keeps_no_more_slots_than_the_window_has() -> None:
    log = RequestLog()
    for second in range(0, 5_000, 3):
        log.tokens[BE].num += 1
        log.tick(float(second))
    assert len(log.recent(5_000.0).slots) == WINDOW_S / SLOT_S


def test_longer_ranges_have_coarser_slots_with_the_same_sums() -> None:
    log = RequestLog()
    for second in range(0, 100_060, 20):
        log.tokens[BE].num += 20
        if second % 100 == 0:
            log.end(replace(ENDED, id=str(second), at=float(second), key="ann", times=took(float(second))))
        log.tick(float(second))
    for slot_s in SLOTS_S[1:]:
        recent = log.recent(100_060.0, slot_s)
        assert len(recent.slots) == NUM_SLOTS + 1, "the present one among them"
        whole = recent.slots[1:-1]
        assert {(slot.be.tokens, sum(slot.rt.ttft.values())) for slot in whole} <= {
            (slot_s, count) for count in (slot_s // 100, slot_s // 100 + 1)
        }
        assert [ended.id for ended in recent.slowest[:2]] == ["100000", "99900"]
        assert recent.keys[0].ended == sum(slot.rt.ended for slot in recent.slots)


def test_owners_are_added_up() -> None:
    one = RecentRequests((Slot(1, Counts(tokens=3)), Slot(2, Counts(tokens=1))), (ENDED,), (REFUSED,))
    slower, later = replace(ENDED, id="c", times=took(3.0)), replace(REFUSED, id="d", at=6.0)
    other = RecentRequests((Slot(2, Counts(tokens=5), Counts(refused=1)),), (slower,), (later,))
    assert together((one, other)) == RecentRequests(
        (Slot(1, Counts(tokens=3)), Slot(2, Counts(tokens=6), Counts(refused=1))), (slower, ENDED), (later, REFUSED)
    )
