"""The search for the cheapest deployment, without simulations; and what a workload demands of devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from random import Random

import pytest

from alignedserve.config.topology import Topology
from alignedserve.core import ServiceClass, Slo
from alignedserve.lab.devices import hardware
from alignedserve.lab.loads.records.records import RequestOutcome, RequestRecord
from alignedserve.lab.loads.workload.spec import read_workload
from alignedserve.lab.planning.demand import Demand, WorkerCapacity, demand_of, expected_requests, family_of
from alignedserve.lab.planning.deployments import DeploymentFamily, DeviceOffer, PlannedDeployment
from alignedserve.lab.planning.outcome import Count, Hopeless, Outcome, PromisesToKeep, RequestTally
from alignedserve.lab.planning.report import Plan, plan_document, plan_text
from alignedserve.lab.planning.search import PlanTrial, Search

PROMISE = PromisesToKeep(0.99, 0.99)
CHEAP, DEAR = DeviceOffer("cheap", 1.0), DeviceOffer("dear", 2.5)
Holds = Callable[[PlanTrial], bool]


def _family(
    offer: DeviceOffer = CHEAP, least: int = 1, likely: int = 1, share: float | None = None
) -> DeploymentFamily:
    return DeploymentFamily(offer, share, least, likely)


def _outcome(holds: bool) -> Outcome:
    return Outcome(Count(asked=100, missed=0 if holds else 10, late_first=10), Count(), 60.0)


def _search(
    families: list[DeploymentFamily], holds: Holds, most: int = 16, seed: int = 0
) -> tuple[Search, list[PlanTrial]]:
    """Carry out a search over deployments of which it is known which hold."""
    search, tried, order = Search(families, PROMISE, most, seed, (seed + 1, seed + 2)), list[PlanTrial](), Random(0)
    while trials := search.wanted():
        assert not set(trials) & set(tried)
        tried += trials
        for trial in order.sample(trials, len(trials)):
            search.hear(trial, _outcome(holds(trial)))
    return search, tried


def _needs(**sizes: int) -> Holds:
    """Return a rule by which a device holds from so many workers on."""
    return lambda trial: trial.deployment.size >= sizes[trial.deployment.offer.device]


def _searched(tried: list[PlanTrial]) -> list[int]:
    return [trial.deployment.size for trial in tried if trial.seed == 0]


def test_the_smallest_size_that_holds_is_found_in_few_trials() -> None:
    for needed, likely in product(range(1, 17), [1, 4, 9, 16]):
        search, tried = _search([_family(likely=likely)], _needs(cheap=needed))
        assert search.answer == PlannedDeployment(CHEAP, Topology(0, needed)), likely
        assert search.is_checked, (needed, likely)
        assert len(_searched(tried)) <= 11, (needed, likely)


def test_a_good_estimate_costs_two_trials() -> None:
    _, tried = _search([_family(least=3, likely=6)], _needs(cheap=6))
    assert sorted(_searched(tried)) == [5, 6]


def test_hopeless_sizes_are_never_simulated() -> None:
    search, tried = _search([_family(least=5, likely=5)], _needs(cheap=6))
    assert search.answer is not None
    assert search.answer.size == 6
    assert min(_searched(tried)) == 5


def test_what_costs_as_much_as_the_answer_is_not_simulated() -> None:
    """Two cheap workers hold for 2.00 an hour: a dear worker costs 3.00."""
    search, tried = _search([_family(likely=2), _family(DeviceOffer("dear", 3.0))], _needs(cheap=2, dear=1))
    assert search.answer == PlannedDeployment(CHEAP, Topology(0, 2))
    assert {trial.deployment.offer for trial in tried} == {CHEAP}


def test_one_round_decides_a_family_whose_dearest_useful_size_fails() -> None:
    """Six cheap workers hold: of the dear ones two cost less, and if two fail, one does: it runs beside them."""
    families = [_family(likely=6), _family(DEAR, likely=4)]
    search, tried = _search(families, _needs(cheap=6, dear=3))
    assert search.answer == PlannedDeployment(CHEAP, Topology(0, 6))
    assert [trial.deployment.size for trial in tried if trial.deployment.offer == DEAR] == [2, 1]


def test_a_dearer_device_wins_where_few_of_it_are_enough() -> None:
    search, _ = _search([_family(likely=12), _family(DEAR, likely=2)], _needs(cheap=12, dear=2))
    assert search.answer == PlannedDeployment(DEAR, Topology(0, 2))


def test_prefill_workers_keep_their_share_and_each_size_adds_one_worker() -> None:
    sizes = [str(_family(share=0.3).of_size(size).topology) for size in range(2, 9)]
    assert sizes == ["1+1", "1+2", "1+3", "2+3", "2+4", "2+5", "2+6"]


def test_an_answer_that_fails_on_fresh_seeds_is_none() -> None:
    """Four workers were enough for the seed of the search only."""
    search, _ = _search([_family(likely=4)], lambda trial: trial.deployment.size >= (4 if trial.seed == 0 else 5))
    assert search.answer == PlannedDeployment(CHEAP, Topology(0, 5))
    assert search.is_checked
    assert search.holds(PlannedDeployment(CHEAP, Topology(0, 4))) is False


def test_a_cheaper_neighbour_that_holds_on_fresh_seeds_becomes_the_answer() -> None:
    search, _ = _search([_family(likely=6)], lambda trial: trial.deployment.size >= (6 if trial.seed == 0 else 5))
    assert search.answer == PlannedDeployment(CHEAP, Topology(0, 5))
    assert search.is_checked


def test_another_split_than_the_familys_is_found_among_the_neighbours() -> None:
    def holds(trial: PlanTrial) -> bool:
        topology = trial.deployment.topology
        return topology.prefill_workers >= 1 and topology.decode_workers >= 4

    search, _ = _search([_family(least=2, likely=6, share=0.4)], holds)
    assert search.answer == PlannedDeployment(CHEAP, Topology(1, 4))


def test_where_a_failed_check_leaves_a_dearer_family_the_search_goes_on_there() -> None:
    """Only the seed of the search says that the cheap device holds; dear ones were not looked at before."""

    def holds(trial: PlanTrial) -> bool:
        return trial.deployment.offer == DEAR or trial.seed == 0

    search, _ = _search([_family(), _family(DEAR)], holds, most=2)
    assert search.answer == PlannedDeployment(DEAR, Topology(0, 1))


def test_where_nothing_holds_the_largest_size_was_simulated_to_its_end() -> None:
    search, tried = _search([_family(likely=3)], lambda _: False)
    assert search.answer is None
    assert PlanTrial(PlannedDeployment(CHEAP, Topology(0, 16)), 0, is_whole=True) in tried
    text = plan_text(Plan(search, PROMISE, 16, {}, 1.0))
    assert text.startswith("nothing keeps the promises with up to 16 workers")
    assert "chats 90.0% of 99% (TTFT 90.0%, TBT 100.0%)" in text


def test_the_plan_shows_the_answer_what_fails_and_the_check() -> None:
    search, _ = _search([_family(likely=2), _family(DEAR, least=99)], _needs(cheap=2))
    lines = plan_text(Plan(search, PROMISE, 16, {}, 4.0)).splitlines()
    assert lines[0] == "2xcolocated of cheap: 2 GPUs, 2.00 an hour (7 simulations, 4 s)"
    assert [line.split()[0] for line in lines if "of 99%" in line] == ["colocated"]
    assert any(line.startswith("dear, colocated") and "hopeless below 99 workers" in line for line in lines)
    tree = json.loads(plan_document(Plan(search, PROMISE, 16, {"workload": "chat"}, 4.0)))
    assert (tree["answer"]["topology"], tree["answer"]["price"], tree["is_checked"]) == ("2xcolocated", 2.0, True)


def test_an_interrupted_search_says_what_it_has() -> None:
    search = Search([_family(likely=2)], PROMISE, 16, 0, (1, 2))
    for trial in search.wanted():
        search.hear(trial, _outcome(True))
    text = plan_text(Plan(search, PROMISE, 16, {}, 1.0, is_interrupted=True))
    assert text.startswith("colocated of cheap: 1 GPU, 1.00 an hour (2 simulations, 1 s, not checked: interrupted)")


# --- Outcomes


def _record(ttft_s: float, service: ServiceClass = ServiceClass.RT, gap_s: float = 0.1) -> RequestRecord:
    token_at = [10 + ttft_s, 10 + ttft_s + gap_s]
    return RequestRecord("a", service, Slo(), 10.0, 5, token_at, RequestOutcome.FINISHED, token_at[-1])


def test_chats_and_documents_count_apart() -> None:
    tally = RequestTally(PROMISE, {})
    for request in [_record(0.5), _record(1.5), _record(1.5, ServiceClass.BE)]:
        tally.hear(request)
    outcome = tally.outcome()
    assert (outcome.rt.attainment, outcome.be.attainment) == (0.5, 1.0)
    assert (outcome.rt.late_first, outcome.rt.late_gaps) == (1, 0)
    assert outcome.be.tokens == 2
    assert outcome.duration_s == pytest.approx(1.6)
    assert PROMISE.shortfalls([outcome]) == ["chats 50.0% of 99% (TTFT 50.0%, TBT 100.0%)"]
    assert PromisesToKeep(0.5, 1.0, 2.0).shortfalls([outcome]) == ["documents 1 of 2 tokens/s"]
    tally.hear(_record(0.5, gap_s=9.0))
    assert (tally.outcome().rt.late_first, tally.outcome().rt.late_gaps) == (1, 1)


def test_a_hopeless_run_ends_early_and_says_that_it_would_be_worse() -> None:
    tally = RequestTally(PROMISE, {ServiceClass.RT: 1000})
    for _ in range(50):
        tally.hear(_record(1.5))
    with pytest.raises(Hopeless):
        tally.hear(_record(1.5))
    assert PROMISE.shortfalls([tally.outcome()]) == ["chats <94.9% of 99% (TTFT 94.9%, TBT 100.0%)"]


def test_a_few_broken_promises_end_no_short_run() -> None:
    tally = RequestTally(PROMISE, {ServiceClass.RT: 100})
    for _ in range(20):
        tally.hear(_record(1.5))
    with pytest.raises(Hopeless):
        tally.hear(_record(1.5))


# --- Estimates


def test_demand_is_that_of_all_streams() -> None:
    demand = demand_of(read_workload("sizes:prompt=100,output=50,rate=8"), None, 0)
    assert (demand.rate, demand.prompt, demand.output, demand.tbt_s) == (8, 100, 50, 0.1875)
    both = demand_of(read_workload("coserve,rate=6,chat.output=100,documents.output=50,documents.prompt=900"), 100, 0)
    assert both.rate == 6 + 100 / 50
    assert both.output == pytest.approx((6 * 100 + 2 * 50) / 8)


def test_how_many_requests_come_is_known_where_they_do_not_wait_for_answers() -> None:
    assert expected_requests(read_workload("chat,rate=5,first_s=60")) == {ServiceClass.RT: 300, ServiceClass.BE: 0}
    assert expected_requests(read_workload("coserve"))[ServiceClass.BE] is None


def test_fewer_workers_than_the_estimate_cannot_do_the_work() -> None:
    """A hundred chats a second are hopeless for one worker, and four a second are not."""
    device = hardware.from_gpu("h100-llama-3.1-8b-tp1")
    limits, offer = device.limits(2048, 128), DeviceOffer("h100-llama-3.1-8b-tp1", 3.9)
    few, many = (demand_of(read_workload(f"chat,rate={rate}"), None, 0) for rate in (4, 100))
    capacity = WorkerCapacity.of(device, limits, many)
    assert capacity.colocated < min(capacity.decode, capacity.prefill)
    assert family_of(offer, False, few, WorkerCapacity.of(device, limits, few)).least == 1
    large = family_of(offer, False, many, capacity)
    assert 1 < large.least <= large.likely
    parted = family_of(offer, True, many, capacity)
    assert parted.prompt_share is not None
    assert 0 < parted.prompt_share < 0.5
    assert parted.least >= 2


@pytest.mark.parametrize("parted", [False, True])
def test_where_nothing_is_demanded_the_smallest_deployment_is_likely(parted: bool) -> None:
    least = 2 if parted else 1
    found = family_of(CHEAP, parted, Demand(0.0, 100, 50), WorkerCapacity(1.0, 2.0, 2.0))
    assert (found.prompt_share, found.least, found.likely) == (0.5 if parted else None, least, least)


def test_a_device_too_slow_for_the_time_between_tokens_is_never_enough() -> None:
    device = hardware.from_gpu("rtx4090-llama-3.1-8b-tp1")
    demand = demand_of(read_workload("chat,tbt_s=0.001"), None, 0)
    found = family_of(
        DeviceOffer("rtx4090", 1.0), False, demand, WorkerCapacity.of(device, device.limits(2048, 128), demand)
    )
    assert found.least >= 1000
