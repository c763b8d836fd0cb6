"""A caller that stays within its part of a worker is served as promised, whatever others send."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core import Request, ServiceClass, WorkerLimits
from alignedserve.cost.fit import Point
from alignedserve.cost.model import Shape
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import Standing
from alignedserve.worker.step.waiting_prompts import Filing, Place, PromiseLine
from tests.conftest import examples
from tests.cost.fitted import cost_of
from tests.decode_worker.test_packing import LIMITS, Device, make_request, parts
from tests.rare import rarely

RT, BE = ServiceClass.RT, ServiceClass.BE
DEFAULT = Policy(reuse=False)
ROOMY = replace(LIMITS, num_blocks=256)
SEATS = LIMITS.max_batch
FLOOD = 5 * SEATS
SIZES = (4, 16, 64, 256)


def of(caller: str, new_request: Request) -> Request:
    return replace(new_request, salt=caller)


def flood(caller: str, number: int = FLOOD, tokens: int = 30, prompt: int = 4) -> list[Request]:
    return [of(caller, make_request(f"{caller}{at}", RT, prompt, tokens)) for at in range(number)]


def steps_until(device: Device, name: str) -> int:
    """Return how many steps end until the request has its first token."""
    for number in range(1, 500):
        device.step()
        if device.said[name]:
            return number
    raise AssertionError(f"{name} was never served")


def test_a_chat_does_not_wait_for_the_seats_of_anothers_flood() -> None:
    device = Device(DEFAULT, ROOMY)
    device.ask(*flood("ann"))
    for _ in range(5):
        device.step()
    assert len(parts(device.plans[-1])) == SEATS
    device.ask(of("bob", make_request("bob", RT, tokens=4, at=device.now)))
    assert steps_until(device, "bob") <= 2  # the step under way, and its own
    device.run()
    assert {name: number for name, number in device.said.items() if name != "bob"} == {
        f"ann{at}": 30 for at in range(FLOOD)
    }


def test_a_flood_of_one_caller_is_served_in_the_order_in_which_it_came() -> None:
    """Where nobody else wants seats, nothing differs from a deployment without keys."""
    runs = []
    for caller in ("", "ann"):
        device = Device(DEFAULT, ROOMY)
        device.ask(*(replace(one, id=one.id.removeprefix(caller)) for one in flood(caller)))
        device.run()
        runs.append([parts(plan) for plan in device.plans])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("tokens", [1, 2])  # with one, none of the flood ever decodes
def test_a_short_prompt_does_not_wait_for_anothers_long_ones(tokens: int) -> None:
    limits = WorkerLimits(num_blocks=4096, block_size=4, page_size=8, max_step_tokens=64, max_batch=32)
    cost = cost_of([Point(Shape.build([(size, start)]), 1.5e-4 * size) for size in SIZES for start in (0, 256)])
    device = Device(DEFAULT, limits, cost=cost)
    device.ask(*flood("ann", number=16, tokens=tokens, prompt=640))  # 1.5 s of prompts
    for _ in range(5):
        device.step()
    device.ask(of("bob", make_request("bob", RT, tokens=2, at=device.now)))
    assert steps_until(device, "bob") <= 3
    assert parts(next(plan for plan in device.plans if "bob" in parts(plan))) == ["bob"]


@pytest.mark.parametrize(("decode_s", "is_alone"), [(1e-3, True), rarely((1e-5, False))])
def test_a_short_prompt_runs_before_the_decodes_of_one_that_holds_all_seats(decode_s: float, is_alone: bool) -> None:
    """Where that halves the time of its step: else both would only take longer."""
    points = [Point(Shape.build([(size, 0)]), 1e-3 + 1e-5 * size) for size in SIZES]
    points += [Point(Shape.build(prefixes=[8] * size), 1e-3 + decode_s * size) for size in SIZES]
    device = Device(DEFAULT, replace(ROOMY, max_batch=16, max_step_tokens=64), cost=cost_of(points))
    device.ask(*flood("ann", number=15, tokens=40))
    for _ in range(20):
        device.step()
    device.ask(of("bob", make_request("bob", RT, tokens=2, at=device.now)))
    steps_until(device, "bob")
    first = next(plan for plan in device.plans if "bob" in parts(plan))
    assert (parts(first) == ["bob"]) == is_alone
    device.run()
    assert device.said == {"bob": 2, **{f"ann{at}": 40 for at in range(15)}}


def test_late_chats_go_on_however_many_guests_come_one_after_the_other() -> None:
    """Each guest wants one token, so none ever decodes, and there is one whenever a step is planned. Steps take longer
    than a gap may, so the host's chats are late, and nothing of theirs is due."""
    points = [Point(Shape.build([(size, 0)]), 1e-3 + 1e-5 * size) for size in SIZES]
    points += [Point(Shape.build(prefixes=[8] * size), 1e-3 + 1e-3 * size) for size in SIZES]
    limits = replace(ROOMY, max_batch=16, max_step_tokens=64)
    device = Device(DEFAULT, limits, step_s=0.3, cost=cost_of(points))
    device.ask(*flood("ann", number=12, tokens=200))
    for _ in range(15):
        device.step()
    before = device.said["ann0"]
    for number in range(60):
        device.ask(of("bob", make_request(f"bob{number}", RT, tokens=1, at=device.now)))
        device.step()
    assert sum(device.said[f"bob{number}"] for number in range(60)) >= 58
    assert device.said["ann0"] >= before + 30


def test_what_yields_is_promised_again_when_there_is_room() -> None:
    device = Device(DEFAULT, ROOMY)
    device.ask(*flood("ann", SEATS + 1, tokens=200), of("bob", make_request("bob", RT, tokens=3)))
    steps_until(device, "bob")
    while device.said["bob"] < 3:
        device.step()
    device.ask(*(make_request(f"document{at}", BE, tokens=50) for at in range(SEATS)))
    for _ in range(60):
        device.step()
    assert not any(name.startswith("document") for plan in device.plans[-20:] for name in parts(plan))
    device.run()
    assert device.said["document0"] == 50


@pytest.mark.parametrize("callers", [2, 3])
def test_callers_with_as_much_to_do_get_as_much(callers: int) -> None:
    device = Device(DEFAULT, replace(ROOMY, max_batch=6))
    for caller in "abc"[:callers]:
        device.ask(*flood(caller, tokens=40))
    for _ in range(90):
        device.step()
    got = [sum(number for name, number in device.said.items() if name[0] == caller) for caller in "abc"[:callers]]
    assert min(got) >= 0.8 * max(got)


def test_a_caller_of_twice_the_weight_gets_twice_as_much() -> None:
    device = Device(DEFAULT, replace(ROOMY, max_batch=6))
    device.ask(*flood("ann", tokens=40), *(replace(one, weight=2) for one in flood("bob", tokens=40)))
    for _ in range(90):
        device.step()
    ann, bob = (sum(number for name, number in device.said.items() if name.startswith(it)) for it in ("ann", "bob"))
    assert bob == pytest.approx(2 * ann, rel=0.2)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(1, 12), st.integers(1, 20), st.integers(0, 8)),
        min_size=1,
        max_size=24,
    )
)
def test_nothing_is_lost_whoever_asks_for_how_much(asked: list[tuple[str, bool, int, int, int]]) -> None:
    device = Device(DEFAULT, LIMITS)
    for at, (caller, is_rt, prompt, tokens, pause) in enumerate(asked):
        for _ in range(pause):
            if device.plan is not None:
                device.step()
        device.ask(of(caller, make_request(f"{caller}{at}", RT if is_rt else BE, prompt, tokens, device.now)))
    device.run()
    assert device.said == {f"{caller}{at}": tokens for at, (caller, _, _, tokens, _) in enumerate(asked)}


# --- Documents


def documents(caller: str, number: int = FLOOD, prompt: int = 4, weight: int = 1, tokens: int = 30) -> list[Request]:
    asked = (make_request(f"{caller}{at}", BE, prompt, tokens) for at in range(number))
    return [replace(of(caller, one), weight=weight) for one in asked]


def served(device: Device, caller: str, plans: slice = slice(None)) -> int:
    """Return how many tokens a caller has had: of prompts, and of outputs twice."""
    done = device.plans[:-1][plans]
    prompts = sum(len(chunk.tokens) for plan in done for chunk in plan.chunks if chunk.request.startswith(caller))
    return prompts + 2 * sum(decode.request.startswith(caller) for plan in done for decode in plan.decodes)


def test_a_document_does_not_wait_for_anothers_flood_of_shorter_ones() -> None:
    device = Device(DEFAULT, ROOMY)
    device.ask(*documents("ann"))
    for _ in range(5):
        device.step()
    device.ask(of("bob", make_request("bob", BE, 40, tokens=4, at=device.now)))
    while not device.said["bob"]:
        device.step()
    waited_for = sum(device.said[f"ann{at}"] == 30 for at in range(FLOOD))
    assert waited_for <= SEATS, "those that had seats when it came"
    device.run()
    assert device.said == {"bob": 4, **{f"ann{at}": 30 for at in range(FLOOD)}}


@pytest.mark.parametrize("weight", [1, 3])
@pytest.mark.parametrize(("prompt", "tokens"), [(24, 30), (4, 3), (24, 3)])
def test_callers_are_served_as_many_tokens_whatever_the_lengths_of_their_documents(
    weight: int, prompt: int, tokens: int
) -> None:
    """If seats alone were shared, a caller with short outputs would have more prompts in the steps, and after documents
    that end together the shortest would get all seats. Counts differ by what all seats hold: all may come free at once.
    """
    device = Device(DEFAULT, replace(ROOMY, max_batch=8))
    device.ask(*documents("ann", 200, weight=weight, tokens=40), *documents("bob", 1_500, prompt, tokens=tokens))
    for _ in range(400):
        device.step()
    assert served(device, "ann") == pytest.approx(weight * served(device, "bob"), abs=8 * (4 + 2 * 40))


def test_a_caller_that_comes_has_saved_up_nothing() -> None:
    """It has not waited, so the others' documents go on beside its own."""
    device = Device(DEFAULT, replace(ROOMY, max_batch=8))
    device.ask(*documents("ann", 100), *documents("bob", 100))
    for _ in range(200):
        device.step()
    device.ask(*(replace(one, arrival_at=device.now) for one in documents("cat", 100)))
    for _ in range(200):
        device.step()
    ann, bob, cat = (served(device, caller, slice(200, 400)) for caller in ("ann", "bob", "cat"))
    assert cat == pytest.approx((ann + bob) / 2, rel=0.2)


def test_a_caller_whose_document_ran_while_others_waited_comes_behind_them_whatever_its_weight() -> None:
    """What it was served counts less than a token by its weight, and the others were served nothing."""
    device = Device(DEFAULT, replace(ROOMY, max_batch=1))
    device.ask(*documents("cat", 1, weight=100))
    device.ask(*documents("ann", 1, prompt=24), *documents("bob", 1, prompt=24))
    while device.said["cat0"] < 30:
        device.step()
    device.ask(replace(documents("cat", 1, weight=100)[0], id="cat1", arrival_at=device.now))
    device.run()
    assert list(dict.fromkeys(name for plan in device.plans for name in parts(plan))) == [
        "cat0",
        "ann0",
        "bob0",
        "cat1",
    ]


def test_documents_of_one_caller_go_the_shortest_first_again_when_others_have_gone() -> None:
    device = Device(DEFAULT, replace(ROOMY, max_batch=2))
    device.ask(*documents("ann", 6), *documents("bob", 1, prompt=24))
    device.run()
    firsts = list(dict.fromkeys(name for plan in device.plans for name in parts(plan)))
    assert firsts[:3] in (["ann0", "ann1", "bob0"], ["ann0", "bob0", "ann1"])
    assert [name for name in firsts if name != "bob0"] == [f"ann{at}" for at in range(6)]


def test_documents_that_wait_are_not_filed_again_as_callers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly each time a document ends, another caller comes behind: thousands of prompts may wait, and stay."""
    device, filed, file = Device(DEFAULT, replace(ROOMY, max_batch=8)), list[str](), PromiseLine.file

    def counted(line: PromiseLine, standing: Standing, by_slack: Place, end: Place) -> list[Filing]:
        filed.append(standing.id)
        return file(line, standing, by_slack, end)

    device.ask(*documents("ann", 200), *documents("bob", 200))
    device.step()
    monkeypatch.setattr(PromiseLine, "file", counted)
    for _ in range(300):
        device.step()
    assert sum(number == 30 for number in device.said.values()) > 40, "many have ended"
    assert len(filed) < 400, "less than once each"
