"""What a gateway knows of its deployment at a moment: parts that come and go, and what they report."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.core import Usage
from alignedserve.dashboard.picture import FORGOTTEN_S, DeploymentView, PartPicture, QueuePicture, WorkerPicture
from alignedserve.metrics.recent import NUM_SLOTS, SLOTS_S, RecentRequests
from alignedserve.protocol.figures import (
    DecodeLengths,
    DecodeSteps,
    GpuFigures,
    Lengths,
    MachineFigures,
    PagesFor,
    ProcessFigures,
    Stages,
    WorkerLoad,
)
from alignedserve.protocol.messages import Figures
from tests.samples import POOL_MEMBER, ROUTER_MEMBER, member

DECODE = member("decode-0")
LENGTHS = DecodeLengths(batch=Lengths((3,), (5, 9), 1, 2), band=(3, 259))


def part(view: DeploymentView, name: str) -> PartPicture:
    (found,) = [part for part in view.parts if part.name == name]
    return found


def test_parts_are_there_and_then_gone_and_then_forgotten() -> None:
    view = DeploymentView()
    view.look([ROUTER_MEMBER, DECODE], 10.0)
    view.look([ROUTER_MEMBER], 12.0)
    gone = part(view, "decode-0")
    assert (gone.is_here, gone.since) == (False, 12.0)
    assert (part(view, "router").is_here, part(view, "router").since) == (True, 10.0)
    view.look([ROUTER_MEMBER], 12.0 + FORGOTTEN_S)
    assert part(view, "decode-0") == gone
    view.look([ROUTER_MEMBER], 12.1 + FORGOTTEN_S)
    assert [part.name for part in view.parts] == ["router"]


def test_a_part_in_its_next_life_is_there_since_then() -> None:
    view = DeploymentView()
    view.look([DECODE], 10.0)
    view.look([member("decode-0", 2)], 15.0)
    again = part(view, "decode-0")
    assert (again.life, again.is_here, again.is_again, again.since) == (2, True, True, 15.0)


def test_a_part_that_started_before_it_was_seen_has_not_been_started_again() -> None:
    """A gateway that starts later sees parts in their later lives."""
    view = DeploymentView()
    view.hear(Figures(worker=WorkerLoad(), process=ProcessFigures(1.0, 1, 1, 3.0), member="decode-0"), 9.0)
    view.look([member("decode-0", 7)], 10.0)
    seen = part(view, "decode-0")
    assert (seen.life, seen.is_again, seen.since) == (7, False, 3.0)


def test_a_worker_that_was_to_go_is_forgotten_when_it_has_gone() -> None:
    view = DeploymentView()
    view.look([ROUTER_MEMBER, DECODE], 10.0)
    view.hear(Figures(worker=WorkerLoad(is_retiring=True), member="decode-0"), 11.0)
    assert part(view, "decode-0").is_retiring
    view.look([ROUTER_MEMBER], 12.0)
    assert [part.name for part in view.parts] == ["router"]


def test_parts_come_by_role_and_name() -> None:
    view = DeploymentView()
    view.look([member("decode-1"), POOL_MEMBER, DECODE, ROUTER_MEMBER], 1.0)
    assert [part.name for part in view.parts] == ["router", "decode-0", "decode-1", "pool-0"]


def test_what_a_worker_reports_goes_with_it() -> None:
    view = DeploymentView()
    view.look([DECODE], 10.0)
    steps = DecodeSteps((8, 0, 0), grouped=2)
    view.hear(Figures(lengths=LENGTHS, slowdown=1.5, steps=steps, member="decode-0"), 11.0)
    assert view.workers == (WorkerPicture("decode-0", LENGTHS, grouped=0.25),)
    assert part(view, "decode-0").slowdown == 1.5
    view.look([], 12.0)
    assert view.workers == ()
    assert part(view, "decode-0").slowdown == 0.0


def test_pages_are_shown_by_kind_and_by_holder() -> None:
    view, holders = DeploymentView(), (PagesFor("", kept=2), PagesFor("prefill-0", leased=5))
    view.look([POOL_MEMBER], 1.0)
    view.hear(Figures(Usage(rt=2, leased=5), holders=holders, member="pool-0"), 2.0)
    (pool,) = view.pools
    assert (pool.name, pool.usage, pool.holders) == ("pool-0", Usage(rt=2, leased=5), holders)


def test_the_router_says_where_requests_are_and_so_that_it_is_there() -> None:
    view = DeploymentView()
    assert (view.queues, view.router_at) == (None, None)
    view.hear(Figures(rt=Stages(pool=1), be=Stages(decode=2), member="router"), 7.0)
    view.hear(Figures(rebuilt_s=1.0, member="router"), 8.0)
    assert (view.queues, view.router_at) == (QueuePicture(Stages(pool=1), Stages(decode=2)), 7.0)


def test_a_part_that_is_down_is_expected_back_as_fast_as_the_last_one_came() -> None:
    view = DeploymentView()
    view.look([ROUTER_MEMBER, DECODE], 10.0)
    view.look([ROUTER_MEMBER], 20.0)
    assert part(view, "decode-0").back_at is None
    view.look([ROUTER_MEMBER, member("decode-0", 2)], 28.0)
    view.look([ROUTER_MEMBER], 40.0)
    assert part(view, "decode-0").back_at == 48.0


def test_the_first_death_is_expected_to_take_as_long_as_the_start_took() -> None:
    view = DeploymentView()
    view.look([ROUTER_MEMBER], 10.0)
    view.look([ROUTER_MEMBER, DECODE], 15.0)
    view.hear(Figures(worker=WorkerLoad(), process=ProcessFigures(1.0, 1, 1, 8.0), member="decode-0"), 16.0)
    view.look([ROUTER_MEMBER], 30.0)
    assert part(view, "decode-0").back_at == 37.0


def test_processors_in_use_are_measured_over_seconds_and_begin_anew_with_each_life() -> None:
    view = DeploymentView()
    view.look([DECODE], 10.0)
    for cpu_s, now in ((3.0, 10.0), (3.5, 11.0), (6.0, 12.0)):
        view.hear(Figures(process=ProcessFigures(cpu_s, 1000, 1, 3.0), member="decode-0"), now)
    assert (part(view, "decode-0").cores, part(view, "decode-0").resident_bytes) == (1.5, 1000)
    view.hear(Figures(process=ProcessFigures(0.1, 1000, 1, 13.0), member="decode-0"), 14.0)
    assert part(view, "decode-0").cores == 0.0


def test_the_load_of_each_slot_of_time_is_kept_for_the_window() -> None:
    view = DeploymentView()
    view.hear(Figures(rt=Stages(unplaced=1, prefill=2, pool=3, decode=9), be=Stages(pool=4), member="router"), 5.0)
    for second in range(5, 1_000):
        view.look([ROUTER_MEMBER], float(second))
    load = view.picture(1_000.0, "ready", (), RecentRequests()).load
    assert [slot.number for slot in load] == list(range(10, 100))
    assert {(slot.rt_queued, slot.be_queued) for slot in load} == {(6, 4)}


def test_the_load_of_a_longer_range_is_the_highest_of_each_slot() -> None:
    view = DeploymentView()
    for second in range(0, 100_000, 10):
        view.hear(Figures(rt=Stages(pool=second % 1_000), be=Stages(), member="router"), float(second))
        view.look([ROUTER_MEMBER], float(second))
    for slot_s in SLOTS_S[1:]:
        load = view.picture(100_000.0, "ready", (), RecentRequests(), slot_s=slot_s).load
        assert len(load) == NUM_SLOTS
        for slot in load[:-1]:
            seen = [second % 1_000 for second in range(int(slot.number * slot_s), int((slot.number + 1) * slot_s), 10)]
            assert slot.rt_queued == max(seen)


def told(busy: float | None, *gpus: float | None) -> Figures:
    use = MachineFigures(busy, 4, 3, 8, tuple(GpuFigures(each, None, None) for each in gpus))
    return Figures(process=ProcessFigures(1.0, 1, 1, 1.0, machine=use))


def test_each_machine_is_shown_once_however_many_parts_tell_of_it() -> None:
    view, other = DeploymentView(), replace(member("decode-1"), node="other")
    view.look([ROUTER_MEMBER, DECODE, other], 5.0)
    assert [*view.machines] == []
    for part_, figures in (("router", told(1.0)), ("decode-0", told(1.0)), ("decode-1", told(3.0, 0.25, None, 0.75))):
        view.hear(replace(figures, member=part_), 6.0)
    assert [(shown.node, shown.use.busy_cores) for shown in view.machines] == [(DECODE.node, 1.0), ("other", 3.0)]
    view.look([ROUTER_MEMBER, DECODE, other], 16.0)
    slot = view.picture(17.0, "ready", (), RecentRequests()).load[-1]
    assert (slot.host, slot.gpu) == (0.5, 0.5), "four of eight cores; a GPU that nobody knows does not count"
    view.look([ROUTER_MEMBER, DECODE], 26.0)
    slot = view.picture(27.0, "ready", (), RecentRequests()).load[-1]
    assert (slot.host, slot.gpu) == (0.25, None)
    assert [shown.node for shown in view.machines] == [DECODE.node]


def test_a_part_that_fell_idle_at_its_first_reading_hides_no_machine() -> None:
    view = DeploymentView()
    view.look([ROUTER_MEMBER, DECODE], 5.0)
    for at, (busy, part_) in enumerate([(1.5, "router"), (None, "decode-0"), (0.5, "router"), (2.5, "decode-0")], 6):
        view.hear(replace(told(busy), member=part_), at)
        assert [shown.use.busy_cores for shown in view.machines] == [busy or 1.5]
