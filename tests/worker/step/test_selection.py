"""The selection for a step: never more than the tightest promise allows, never empty, and the most urgent first."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alignedserve.core import KEY_SALT_SIZE, Estimate, KvForm, Request, Sampling, ServiceClass, Slo
from alignedserve.cost.model import Coefficients, CostModel, Kind, Shape, Uncertainty
from alignedserve.papers.names import SchedulerName
from alignedserve.papers.policy import PaperPolicy
from alignedserve.schedulers.aligned import step_bounds
from alignedserve.schedulers.table import scheduler_of
from alignedserve.scheduling.dues import TokenPromise, promise
from alignedserve.scheduling.policy import Chunking, Policy, Room
from alignedserve.scheduling.slo import Late, StepTimes
from alignedserve.worker.step.blocks import Blocks
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.seating import PackedSeating, Seating
from alignedserve.worker.step.view import PlannedStep, StepView
from alignedserve.worker.step.waiting_prompts import WaitingPrompts
from tests.samples import request

NOW = 100.0
TIMES = StepTimes(mean_s=0.01, most_s=0.02)
# 10 ms, 1 ms for each decode and 0.1 ms for each prompt token
COST = CostModel({kind: Coefficients(fixed=0.01, token=(1e-4,), decode=9e-4) for kind in Kind})


def moment(policy: Policy = Policy(), room: int = 512) -> StepContext:  # noqa: B008  (frozen)
    return StepContext(NOW, COST, TIMES, room, 16, 256, policy, COST.pivot(room))


def select(
    decodes: Sequence[WorkerRequest],
    prompts: Sequence[WorkerRequest],
    waiting: Sequence[WorkerRequest],
    at: StepContext,
    free: int = 0,
    most: int = 1000,
) -> PlannedStep:
    """Choose a step of at most `most` requests on a device with this many free blocks; waiting prompts have none."""
    return choose(decodes, prompts, waits(waiting, at), at, seating(free, at), most)


def choose(
    decodes: Sequence[WorkerRequest],
    prompts: Sequence[WorkerRequest],
    waiting: WaitingPrompts,
    at: StepContext,
    room: Seating,
    most: int = 1000,
) -> PlannedStep:
    """Return the plan of a new scheduler of the context's policy."""
    view = StepView(decodes, prompts, waiting, at, room, [*decodes, *prompts])
    return scheduler_of(at.policy, most).plan(view)


def waits(these: Sequence[WorkerRequest], at: StepContext) -> WaitingPrompts:
    found = WaitingPrompts(at.policy)
    for running in these:
        running.kv = KvForm(())
        found.add(running)
    return found


def seating(free: int, at: StepContext, seats: int = 1000) -> Seating:
    by_chunk = at.policy.room is Room.CHUNKS
    return Seating(Blocks(free), 1000, 16, seats, by_chunk, lambda running: running.num_tokens)


def chat(name: str, left_s: float, prompt: int = 64, output: int = 0, **more: Any) -> WorkerRequest:
    """Return a chat whose next token is due in `left_s`."""
    if output:
        slo, arrival_at, emitted_at = Slo(ttft_s=1.0, tbt_s=1.0), NOW - 10, NOW + left_s - 1.0
    else:
        slo, arrival_at, emitted_at = Slo(ttft_s=1.0, tbt_s=1.0), NOW + left_s - 1.0, None
    new_request = replace(
        request(name, prompt=prompt, max_tokens=100), slo=slo, arrival_at=arrival_at, emitted_at=emitted_at
    )
    return running(replace(new_request, **more), output)


def document(name: str, prompt: int = 64, output: int = 0, jct_s: float = 1000.0) -> WorkerRequest:
    new_request = replace(request(name, prompt=prompt, max_tokens=100), service=ServiceClass.BE, slo=Slo(jct_s=jct_s))
    return running(replace(new_request, arrival_at=NOW - 0.1), output)


def running(request: Request, output: int) -> WorkerRequest:
    """Return the request as it runs: with output it decodes, without output its prompt is still to run."""
    prefix = len(request.prompt) + output - 1 if output else 0
    return WorkerRequest(request, promise(request, Policy(), output), [7] * output, KvForm((0,)), prefix)


def ran(selection: PlannedStep) -> list[tuple[str, Any]]:
    decodes = [(decode.request.id, 1) for decode in selection.decodes]
    return decodes + [(chunk.request, len(chunk.tokens)) for chunk in selection.chunks]


class TestTheBound:
    def test_all_run_where_there_is_time_for_all(self) -> None:
        decodes = [chat("a", 0.5, output=3), document("b", output=3)]
        assert ran(select(decodes, [document("c", prompt=100)], [], moment())) == [("a", 1), ("b", 1), ("c", 100)]

    def test_a_prompt_is_cut_to_what_the_tightest_chat_leaves(self) -> None:
        """The 0.03 s are 0.01 fixed, 0.001 for the decode, and 0.019 for 190 tokens."""
        found = select([chat("a", 0.03, output=3)], [document("d", prompt=400)], [], moment())
        assert ran(found) == [("a", 1), ("d", pytest.approx(190, abs=1))]

    def test_a_prompt_whose_log_probabilities_are_asked_for_is_cut_to_half(self) -> None:
        """The logits of each token take about as long as the token."""
        scored = document("d", prompt=400)
        scored.request = replace(scored.request, sampling=Sampling(prompt_logprobs=0))
        found = select([chat("a", 0.03, output=3)], [scored], [], moment())
        assert ran(found) == [("a", 1), ("d", pytest.approx(95, abs=1))]
        assert found.predicted_s == pytest.approx(0.03, abs=2e-4)

    @pytest.mark.parametrize(("blocks", "free", "tokens"), [(400, 100, 400), (401, 151, 400), (401, 150, 22)])
    def test_chats_that_hold_much_of_a_full_memory_get_shorter_steps(self, blocks: int, free: int, tokens: int) -> None:
        """Of 1,000 blocks. Beside a decode of 0.011 s a document gets 0.0022 s, so that the chat ends sooner."""
        decode = chat("a", 0.5, output=3)
        decode.kv = KvForm(tuple(range(blocks)))
        found = select([decode], [document("d", prompt=400)], [], moment(), free=free)
        assert ran(found) == [("a", 1), ("d", pytest.approx(tokens, abs=1))]

    @pytest.mark.parametrize(("caller", "weight", "tokens"), [("bob", 1, 10), ("ann", 1, 110), ("ann", 3, 37)])
    def test_a_promise_binds_a_step_for_its_callers_part(self, caller: str, weight: int, tokens: int) -> None:
        """A token each 12 ms is promised, and its decode takes 11: beside others the step takes 22, or 14.7."""
        salts = {name: name.ljust(KEY_SALT_SIZE, "-") for name in ("ann", "bob")}
        slo = Slo(ttft_s=1.0, tbt_s=0.012)
        decode = chat("a", 0.0, output=3, slo=slo, emitted_at=NOW, salt=salts["bob"], weight=weight)
        prompt = document("d", prompt=400)
        prompt.request = replace(prompt.request, salt=salts[caller])
        assert ran(select([decode], [prompt], [], moment())) == [("a", 1), ("d", pytest.approx(tokens, abs=1))]
        if caller == "bob":
            waiting = document("w")
            waiting.request = replace(waiting.request, salt=salts["ann"])
            found = dict(ran(select([decode], [prompt], [waiting], moment())))
            assert found["d"] == pytest.approx(110, abs=1), "a caller whose document waits has its part too"

    def test_a_prompt_of_a_chat_gets_no_more_than_chats_leave(self) -> None:
        """A block for it would make all of them late; its turn comes when one of them ends."""
        found = select([chat("a", 0.0111, output=3)], [chat("b", 0.03, prompt=400)], [], moment())
        assert ran(found) == [("a", 1)]

    def test_a_late_prompt_that_is_longer_than_a_step_gets_a_block_in_each(self) -> None:
        """It never runs at once, and decodes might leave no time for a token for ever."""
        late = chat("b", -0.5, prompt=2000)
        assert ran(select([chat("a", 0.0111, output=3)], [late], [], moment())) == [("a", 1), ("b", 16)]

    def test_a_document_gets_none(self) -> None:
        assert ran(select([chat("a", 0.0111, output=3)], [document("d", prompt=400)], [], moment())) == [("a", 1)]

    def test_a_request_that_waits_for_room_binds_too(self) -> None:
        waiting = [chat("w", 0.03, prompt=10)]
        found = select([], [document("d", prompt=400)], waiting, moment())
        assert ran(found) == [("d", pytest.approx(200, abs=1))]

    def test_a_request_that_is_late_does_not_bind(self) -> None:
        found = select([chat("a", -0.5, output=3)], [document("d", prompt=400)], [], moment())
        assert ran(found) == [("a", 1), ("d", 400)]

    def test_decodes_of_documents_wait_where_there_is_no_time_for_them(self) -> None:
        documents = [document(f"d{number}", output=3) for number in range(30)]
        found = select([*documents, chat("a", 0.0205, output=3)], [], [], moment())
        assert ran(found)[0] == ("a", 1)
        assert len(found.decodes) == 10

    def test_decodes_of_documents_take_nothing_of_a_chat_s_prompt_that_has_to_be_cut(self) -> None:
        """The 0.03 s are 0.01 fixed, 0.001 for the decode, 0.019 for 190 tokens; each document would take 9."""
        documents = [document(f"d{number}", output=3) for number in range(10)]
        found = select([*documents, chat("a", 0.03, output=3)], [chat("new", 0.5, prompt=400)], [], moment())
        assert ran(found) == [("a", 1), ("new", pytest.approx(190, abs=1))]

    @pytest.mark.parametrize("is_seated", [True, False])
    def test_decodes_of_documents_take_no_places_of_an_urgent_prompt(self, is_seated: bool) -> None:
        decodes, urgent = [document(f"d{number}", output=3) for number in range(10)], document("u", 5, jct_s=0.1)
        seated, waiting = ([urgent], []) if is_seated else ([], [urgent])
        found = select(decodes, seated, waiting, moment(room=10), free=10)
        assert ran(found)[-1] == ("u", 5)
        assert len(found.decodes) == 5

    @pytest.mark.parametrize(("form", "size"), [("", 340), ("hidden", 400)])
    def test_a_decode_that_is_late_even_alone_as_its_kv_is_made_again_does_not_bind(self, form: str, size: int) -> None:
        """Alone it takes 11 ms, and as hidden vectors 66 ms more."""
        remaking = CostModel({kind: replace(of, remade=1e-3) for kind, of in COST.coefficients.items()})
        decode = chat("a", 0.045, output=3)
        decode.kv = KvForm((0,), form=form)
        found = dict(ran(select([decode], [document("d", prompt=400)], [], replace(moment(), cost=remaking))))
        assert found["d"] == pytest.approx(size, abs=1)

    def test_documents_wait_where_there_is_no_time_to_make_their_kv_again(self) -> None:
        """After the chat 9.5 ms are left. A document's decode takes 1 ms, and its 66 tokens take another."""
        remaking = CostModel({kind: replace(of, remade=1e-3 / 66) for kind, of in COST.coefficients.items()})
        documents = [document(f"d{number}", output=3) for number in range(30)]
        for running in documents:
            running.kv = KvForm((0,), form="hidden")
        found = select([*documents, chat("a", 0.0205, output=3)], [], [], replace(moment(), cost=remaking))
        assert len(found.decodes) == 5

    def test_slow_steps_lately_do_not_leave_a_chat_unprotected(self) -> None:
        """The time of the chat's own prompt decides whether it can be in time, not recent steps full of documents."""
        at = replace(moment(), times=StepTimes(mean_s=0.31, most_s=0.31))
        found = select([], [chat("rt", 0.04, prompt=40), document("d", prompt=400)], [], at)
        assert ran(found)[0] == ("rt", 40)
        assert found.predicted_s <= 0.04

    def test_a_request_that_is_hopeless_takes_nobody_with_it(self) -> None:
        """A decode alone takes 11 ms."""
        found = select([chat("hopeless", 0.001, output=3), chat("rt", 0.0115, output=3)], [], [], moment())
        assert ran(found) == [("hopeless", 1)] or ran(found) == [("rt", 1)]
        assert found.predicted_s <= 0.0115

    @pytest.mark.parametrize("scheduler", [SchedulerName.ALIGNED, SchedulerName.BEST_FIT])
    def test_a_request_that_is_still_to_come_binds_documents_and_no_chats(self, scheduler: SchedulerName) -> None:
        at = moment(Policy(scheduler))
        at.max_step_for_arrivals_s = 0.02
        found = select([], [chat("rt", 0.9, prompt=400)], [], at)
        assert ran(found) == [("rt", 400)]
        found = select([], [document("d", prompt=400)], [], at)
        assert ran(found) == [("d", pytest.approx(100, abs=1))]

    def test_documents_leave_room_for_the_chats_of_another_caller(self) -> None:
        """A chat waits for the end of a step. A step with 1,000 tokens would take 0.11 s; a chunk of 100 saturates."""
        at, seated = replace(moment(), pivot=100, expected_chats=[("", 0.08)]), [document("d", prompt=1000)]
        assert ran(select([], seated, [], at)) == [("d", 400)], "its own: its promise counts"
        at.expected_chats = [("other", 0.08)]
        assert ran(select([], seated, [], at)) == [("d", pytest.approx(300, abs=1))], "half of its prompt"
        at.expected_chats = [("other", 0.02)]
        assert ran(select([], seated, [], at)) == [("d", pytest.approx(100, abs=1))], "a chunk that saturates"
        decodes = [document(f"d{number}", output=3) for number in range(20)]
        assert select(decodes, seated, [], at).predicted_s == pytest.approx(0.06, abs=0.001), "twice the decodes"
        assert ran(select([], [chat("rt", 0.9, prompt=400)], [], at)) == [("rt", 400)], "no chat waits for it"

    def test_where_steps_pause_a_chat_of_another_caller_waits_for_one_layer_beside_documents(self) -> None:
        """The chat's prompt takes 0.02 s alone: a layer takes 0.006 s at most, and a third of S_pf fits in any case."""
        at = replace(moment(), pivot=300, layers=5, expected_chats=[("other", 0.02)])
        seated = [document("d", prompt=1000)]
        assert ran(select([], seated, [], at)) == [("d", pytest.approx(200, abs=1))]
        at.layers = 2
        assert ran(select([], seated, [], at)) == [("d", pytest.approx(100, abs=1))]
        at.expected_chats = [("", 0.02)]
        assert ran(select([], seated, [], at)) == [("d", 512)], "its own: its promise counts"

    def test_beside_guests_the_prompts_of_a_host_are_no_longer_than_a_layer_may_be(self) -> None:
        at = replace(moment(), pivot=300, layers=5, expected_chats=[("", 0.02), ("other", 0.02)])
        prompts = [chat("host's", 9.0, prompt=1000)]
        assert ran(select([], prompts, [], at)) == [("host's", pytest.approx(200, abs=1))]
        at.layers = 0
        assert ran(select([], prompts, [], at)) == [("host's", 300)]
        at.expected_chats = at.expected_chats[:1]
        assert ran(select([], prompts, [], at)) == [("host's", 512)], "nobody else may come"

    def test_documents_leave_room_for_a_pause_for_the_longest_prompt_that_may_come(self) -> None:
        """Of 60 ms a pause may take 30. The others are 0.01 fixed, 0.001 for the decode, and 0.019 for 190 tokens."""
        at = replace(moment(), layers=12, expected_chats=[("bob", 0.01), ("eve", 0.03)])
        found = select([chat("a", 0.06, output=3)], [], [document("d", prompt=400)], at, free=50)
        assert ran(found) == [("a", 1), ("d", pytest.approx(190, abs=1))]

    def test_a_chat_that_is_handed_on_binds_prompts_and_no_decodes_of_chats(self) -> None:
        at = replace(moment(), max_step_for_handoffs_s=0.03)
        prompt = ran(select([chat("a", 0.9, output=3)], [chat("new", 0.9, prompt=400)], [], at))
        assert prompt == [("a", 1), ("new", pytest.approx(190, abs=1))]
        chats = [chat(f"c{number}", 0.9, output=3) for number in range(40)]
        assert len(select(chats, [], [], at).decodes) == 40

    def test_a_chat_does_not_cut_its_own_prompt(self) -> None:
        """Tokens that the prompt takes in this step are saved in later steps."""
        at = replace(moment(), chunk=100)
        found = select([chat("a", 0.5, output=3)], [chat("rt", 0.09, prompt=400)], [], at)
        assert ran(found) == [("a", 1), ("rt", 400)]

    @pytest.mark.parametrize("late", [Late.DECAY, Late.DROP_LAST])
    def test_where_a_block_makes_chats_late_all_of_a_prompt_makes_them_late_once(self, late: Late) -> None:
        """A block ends after 0.0126 s; the first token would be late if the prompt ran block by block."""
        at, decodes = moment(Policy(late=late)), [chat(f"a{number}", 0.0155, output=3) for number in range(5)]
        assert ran(select(decodes, [chat("rt", 0.08, prompt=400)], [], at))[-1] == ("rt", 400)
        hopeless = select(decodes, [chat("rt", 0.03, prompt=400)], [], at)
        assert ran(hopeless)[-1] == ("rt", 5)  # what chats leave

    @pytest.mark.parametrize(("num", "size"), [(1, 400), (2, 400), (3, 20)])
    def test_a_first_token_is_worth_a_few_late_tokens_and_no_more(self, num: int, size: int) -> None:
        decodes = [chat(f"a{number}", 0.012 + 0.001 * num, output=3) for number in range(num)]
        found = select(decodes, [chat("rt", 0.08, prompt=400)], [], moment())
        assert ran(found)[-1] == ("rt", pytest.approx(size, abs=1))

    @pytest.mark.parametrize(("num", "size"), [(16, 400), (17, 20)])
    def test_chats_that_were_late_before_have_less_to_lose(self, num: int, size: int) -> None:
        decodes = [chat(f"a{number}", 0.012 + 0.001 * num, output=3) for number in range(num)]
        for decode in decodes[2:]:
            assert isinstance(decode.promise, TokenPromise)
            decode.promise.has_missed = True
        found = select(decodes, [chat("rt", 0.08, prompt=400)], [], moment())
        assert ran(found)[-1] == ("rt", pytest.approx(size, abs=1))

    def test_the_first_runs_alone_where_nothing_fits(self) -> None:
        far = [chat(f"a{number}", 0.0105, output=3) for number in range(3)]
        assert len(select(far, [], [], moment()).decodes) >= 1

    @pytest.mark.parametrize("waiting_s", [0.0005, 0.0104])
    @pytest.mark.parametrize("late", [Late.KEEP, Late.DECAY])
    def test_prompts_with_memory_go_on_where_the_first_waits_for_it(self, late: Late, waiting_s: float) -> None:
        """The first gets no memory from others, however little time there is while chats are still to come."""
        at, far = moment(Policy(late=late)), [chat(f"a{number}", 0.0105, output=3) for number in range(3)]
        at.max_step_for_arrivals_s = 0.001
        found = select(far, [], [chat("first", waiting_s)], at, free=1)
        assert found.decodes
        assert not found.admitted

    def test_prompts_that_are_seated_go_on_where_the_first_waits_for_a_seat(self) -> None:
        """However little time there is, no seated request would give up its seat."""
        at = moment()
        at.max_step_for_arrivals_s = 0.001
        seated = [document(f"d{number}", prompt=200) for number in range(3)]
        found = choose([], seated, waits([document("first", prompt=10)], at), at, seating(50, at, seats=0))
        assert ran(found) == [("d0", 16)]

    @pytest.mark.parametrize("is_rt", [True, False])
    def test_without_a_seat_only_a_chat_runs_beside_documents(self, is_rt: bool) -> None:
        waiting = chat("c", 0.9, prompt=10) if is_rt else document("d", 10)
        at, decodes = moment(), [document("seated", output=3)]
        seats = PackedSeating(Blocks(9), 10, 16, 0, False, seating(9, at).room_for, as_they_leave=list)
        found = choose(decodes, [], waits([waiting], at), at, seats)
        assert (found.decodes, [*found.admitted]) == (decodes, [waiting] * is_rt)

    def test_a_request_that_is_dropped_last_gets_no_block_ahead_of_others(self) -> None:
        late, in_time = chat("late", -0.5, prompt=40), chat("a", 0.01105, output=3)
        assert ran(select([in_time], [late], [], moment(Policy(late=Late.DROP_LAST)))) == [("a", 1)]

    @pytest.mark.parametrize(("late", "size"), [(Late.DECAY, 190), (Late.DROP_LAST, 400)])
    def test_a_late_chat_binds_by_the_time_between_tokens_unless_the_late_are_dropped(
        self, late: Late, size: int
    ) -> None:
        """Else one slow step leaves all chats unprotected, or a chat that is given up takes time of others."""
        decodes = [chat("a", -0.5, output=3, slo=Slo(ttft_s=1.0, tbt_s=0.03))]
        found = dict(ran(select(decodes, [document("d", prompt=400)], [], moment(Policy(late=late)))))
        assert found["d"] == pytest.approx(size, abs=1)


class TestUncertainPredictions:
    UNCERTAIN = replace(COST, uncertainty=dict.fromkeys(Kind, Uncertainty(0.5, 1.0)))

    def at(self) -> StepContext:
        return replace(moment(), cost=self.UNCERTAIN)

    def test_all_chats_that_decode_run_as_long_as_they_are_predicted_to_be_in_time(self) -> None:
        chats = [chat(f"c{number}", 0.025, output=5) for number in range(10)]
        assert len(select(chats, [], [], self.at()).decodes) == 10

    def test_nothing_else_runs_that_might_make_them_late(self) -> None:
        chats = [chat(f"c{number}", 0.05, output=5) for number in range(5)]
        everybody = [*chats, document("be", output=5)]
        assert select(everybody, [document("long", 400)], [], self.at()).decodes == chats
        assert len(select(everybody, [document("long", 400)], [], moment()).decodes) == 6

    @pytest.mark.parametrize(("is_asked", "tokens"), [(False, 190), (True, 0)])
    def test_a_chat_that_asked_for_nothing_leaves_room_for_prompts_in_any_case(
        self, is_asked: bool, tokens: int
    ) -> None:
        """A machine that is stopped now and then: with the margin for that, prompts would wait until all decodes end.
        Of the 0.03 s that are enough 0.01 are fixed, 0.001 for the decode, and 0.019 for 190 tokens."""
        unsure = replace(COST, uncertainty=dict.fromkeys(Kind, Uncertainty(1.0, 15.0)))
        decodes = [chat("a", 1.0, output=3, slo=Slo(ttft_s=1.0, tbt_s=0.05, is_asked=is_asked))]
        at = replace(moment(), cost=unsure, enough_s=0.03)
        found = dict(ran(select(decodes, [], [chat("b", 0.9, prompt=900)], at, free=100)))
        assert found.get("b", 0) == pytest.approx(tokens, abs=1)

    def test_documents_find_no_more_room_for_that(self) -> None:
        unsure = replace(COST, uncertainty=dict.fromkeys(Kind, Uncertainty(1.0, 15.0)))
        decodes = [chat("a", 1.0, output=3, slo=Slo(ttft_s=1.0, tbt_s=0.05, is_asked=False))]
        at = replace(moment(), cost=unsure, enough_s=0.03)
        assert ran(select(decodes, [document("d", prompt=400)], [], at)) == [("a", 1)]


class TestDocumentsBesideChats:
    LONG = 2048  # tokens of a step

    def test_their_prompts_are_no_longer_than_saturates_the_hardware(self) -> None:
        """Three quarters of the 0.15 s are less than the saturating number of tokens takes."""
        at = moment(room=self.LONG)
        beside = select([chat("c", 0.15, output=5)], [document("be", 2000)], [], at)
        assert ran(beside) == [("c", 1), ("be", at.pivot)]
        assert ran(select([document("other", output=5)], [document("be", 2000)], [], at)) == [
            ("other", 1),
            ("be", 2000),
        ]

    def test_or_as_long_as_three_quarters_of_the_time_of_the_step(self) -> None:
        """Three quarters of the 0.2 s are 0.01 fixed, 0.001 for the decode, and 0.139 for 1,390 tokens."""
        found = select([chat("c", 0.2, output=5)], [document("be", 2000)], [], moment(room=self.LONG))
        assert ran(found) == [("c", 1), ("be", pytest.approx(1390, abs=1))]

    def test_chats_that_wait_have_all_the_time_there_is(self) -> None:
        at = moment(room=self.LONG)
        found = select([chat("c", 0.2, output=5)], [document("be", 2000)], [chat("new", 0.9, 1500)], at, free=200)
        assert ran(found) == [("c", 1), ("new", 1500)]


class TestDocumentsAmongThemselves:
    """Best-effort prompts that are not urgent: those come first that are soonest through."""

    PAPER = Policy(SchedulerName.ACCELGEN_NO_BATCH)

    def waited(self, name: str, prompt: int, seconds: float) -> WorkerRequest:
        new_request = replace(
            request(name, prompt=prompt, max_tokens=100), service=ServiceClass.BE, slo=Slo(jct_s=100_000.0)
        )
        return running(replace(new_request, arrival_at=NOW - seconds), 0)

    @pytest.mark.parametrize("seated", [True, False])
    def test_the_shortest_comes_first(self, seated: bool) -> None:
        prompts = [document("long", prompt=450), document("short", prompt=300), document("middle", prompt=400)]
        split = (prompts, []) if seated else ([], prompts)
        found = select([], *split, moment(room=800), free=200)
        assert ran(found) == [("short", 300), ("middle", 400), ("long", 100)]

    @pytest.mark.parametrize("seated", [True, False])
    def test_a_prompt_that_has_waited_long_comes_before_shorter_ones(self, seated: bool) -> None:
        """It rises by a level for each age that it has waited."""
        age_s = Policy().age_s
        prompts = [
            self.waited("new", 300, 0.1),
            self.waited("old", 450, 2.5 * age_s),
            self.waited("older", 460, 4 * age_s),
        ]
        split = (prompts, []) if seated else ([], prompts)
        assert ran(select([], *split, moment(room=1000), free=200)) == [("older", 460), ("old", 450), ("new", 90)]

    def test_seated_and_waiting_prompts_are_one_line(self) -> None:
        found = select(
            [], [document("seated", prompt=450)], [document("waits", prompt=300)], moment(room=500), free=200
        )
        assert ran(found) == [("waits", 300), ("seated", 200)]

    @pytest.mark.parametrize("seated", [True, False])
    def test_accelgen_goes_by_slack(self, seated: bool) -> None:
        """The deadline is spread over all steps: of two requests with the same deadline the long one has less slack."""
        prompts = [
            document("patient", prompt=300, jct_s=2000.0),
            document("hasty", prompt=450, jct_s=20.0),
        ]
        split = (prompts, []) if seated else ([], prompts)
        by_slack = ran(select([], *split, moment(self.PAPER, room=700), free=200))
        assert by_slack[0][0] == "hasty"
        assert ran(select([], *split, moment(room=700), free=200))[0][0] == "patient"


class TestTheOrder:
    def test_urgent_chats_then_chats_then_behind_documents_then_documents(self) -> None:
        prompts = [
            document("be", prompt=10),
            chat("rt", 0.8, prompt=10),
            document("behind", prompt=10, jct_s=0.1),
            chat("urgent", 0.03, prompt=10),
        ]
        found = select([], prompts, [], moment(room=35))
        assert ran(found) == [("urgent", 10), ("rt", 10), ("behind", 10), ("be", 5)]

    @pytest.mark.parametrize("most", [1, 2])
    def test_of_urgent_documents_decodes_come_first(self, most: int) -> None:
        """With a single place the order of decodes is kept between steps."""
        decodes = [document(name, output=3, jct_s=0.1) for name in ("a", "b")]
        found = select(decodes, [document("prompt", 10, jct_s=0.05)], [], moment(), most=most)
        assert ran(found) == [("a", 1), ("b", 1)][:most]

    def test_of_documents_that_are_all_behind_the_least_urgent_leaves(self) -> None:
        behind = [document(name, output=3, jct_s=jct_s) for name, jct_s in (("little", 0.1), ("much", 0.05))]
        assert scheduler_of(Policy()).leaving((), behind, moment()) is behind[0]

    def test_by_levels_the_request_with_the_longest_wait_for_a_step_leaves(self) -> None:
        """The last in line waits for 48 steps of others, and the second for 19. Age would bring the last to the front
        long before the second, but only in 10 s."""
        policy, line = Policy(SchedulerName.ALISE), []
        for name, tokens, waited_s in (("first", 20, 1.0), ("second", 30, 1.0), ("last", 40, 230.0)):
            asked = replace(request(name, max_tokens=100), service=ServiceClass.BE, estimate=Estimate(tokens, tokens))
            line.append(running(replace(asked, arrival_at=NOW - waited_s, slo=Slo(jct_s=1e5)), 1))
            line[-1].promise.served(NOW)
        at = replace(moment(policy), times=StepTimes(mean_s=0.05, most_s=0.05))
        assert scheduler_of(policy, 8).leaving((), line, at) is line[-1]

    def test_priority_counts_among_those_with_time(self) -> None:
        prompts = [chat("a", 0.8, prompt=10), chat("b", 0.9, prompt=10, priority=-1)]
        assert ran(select([], prompts, [], moment(room=10))) == [("b", 10)]

    def test_the_late_go_last_where_they_are_dropped(self) -> None:
        prompts = [chat("late", -0.5, prompt=10), chat("b", 0.9, prompt=10)]
        at = moment(Policy(late=Late.DROP_LAST), room=10)
        assert ran(select([], prompts, [], at)) == [("b", 10)]

    def test_a_late_chat_passes_a_document_that_waits_for_memory(self) -> None:
        at, waiting = moment(Policy(late=Late.DROP_LAST)), [document("d", prompt=100), chat("late", -0.5, prompt=10)]
        assert ran(select([chat("a", 0.9, output=3)], [], waiting, at, free=4)) == [("a", 1), ("late", 10)]

    @pytest.mark.parametrize(("jct_s", "expected"), [(0.1, [("w", 40), ("s", 40)]), (1000.0, [("s", 40)])])
    def test_accelgen_has_two_long_prompts_only_where_one_is_urgent(
        self, jct_s: float, expected: list[tuple[str, int]]
    ) -> None:
        at = moment(PaperPolicy(SchedulerName.ACCELGEN, long_prompt=30))
        found = select([], [document("s", 40)], [document("w", 40, jct_s=jct_s)], at, free=10)
        assert ran(found) == expected

    def test_first_come_first_served_asks_nothing_else(self) -> None:
        prompts = [document("be", prompt=300), chat("urgent", 0.03, prompt=300)]
        at = moment(Policy(SchedulerName.FCFS, Chunking.FIXED))
        assert ran(select([chat("a", 0.0111, output=3)], prompts, [], at)) == [("a", 1), ("be", 300), ("urgent", 211)]


chats = st.builds(chat, st.text("abc", min_size=1), st.floats(-1, 1), st.integers(1, 300), st.integers(0, 3))
documents = st.builds(
    document, st.text("def", min_size=1), st.integers(1, 300), st.integers(0, 3), st.floats(0.01, 100)
)


@given(
    st.lists(st.one_of(chats, documents), min_size=1, max_size=12, unique_by=lambda running: running.request.id),
    st.data(),
)
def test_a_step_is_never_empty_nor_too_large_nor_late_by_a_document(
    all_: list[WorkerRequest], data: st.DataObject
) -> None:
    room = data.draw(st.integers(len(all_), 400))
    decodes = [running for running in all_ if running.output]
    prompts = [running for running in all_ if not running.output]
    found = select(decodes, prompts, [], moment(room=room))
    sizes = [size for _, size in ran(found)]
    assert 0 < sum(sizes) <= room
    assert len({name for name, _ in ran(found)}) == len(sizes)
    shape = Shape.build(
        [(len(chunk.tokens), chunk.start) for chunk in found.chunks], [decode.prefix for decode in found.decodes]
    )
    assert found.predicted_s == pytest.approx(COST.seconds(shape))
    ran_be = [name for name, _ in ran(found) if set(name) & set("def")]
    promises = [running.promise for running in all_ if running.promise.is_rt]
    in_time = [promise.due_at(NOW) for promise in promises if not promise.num_missed]
    reachable = [due_at for due_at in in_time if due_at - NOW >= TIMES.most_s * 2]
    if ran_be and reachable and len(sizes) > 1:
        assert NOW + found.predicted_s <= min(reachable) + 1e-9 or any(name not in ran_be for name, _ in ran(found))


# Late documents may take the place of a chat that can wait (BROS §4.2), as any document may.
timely = documents.filter(lambda running: not running.promise.is_late(NOW))


# The late chat made another chat's prompt look hopeless, so that this prompt no longer bound the step.
@example(
    [
        chat("a", 0.0, 1),
        chat("aa", 0.0264, 134),
        chat("aaa", 0.0, 1, 1),
        chat("aaaa", 0.0, 1, 1),
        chat("late", -1.0, 1, 1),
        document("d", 1, 1, 1.0),
    ]
)
@given(st.lists(st.one_of(chats, timely), min_size=1, max_size=12, unique_by=lambda running: running.request.id))
def test_the_late_that_are_dropped_change_nothing_for_the_others(all_: list[WorkerRequest]) -> None:
    """A late request never delays a request that could be in time."""
    at = moment(Policy(late=Late.DROP_LAST), room=200)
    late = {running.request.id for running in all_ if running.promise.is_late(NOW)}
    in_time = [running for running in all_ if running.request.id not in late]

    def chosen(some: list[WorkerRequest]) -> list[tuple[str, Any]]:
        return ran(
            select(
                [running for running in some if running.output],
                [running for running in some if not running.output],
                [],
                at,
            )
        )

    if in_time:
        assert sorted(share for share in chosen(all_) if share[0] not in late) == sorted(chosen(in_time))


def test_a_request_that_has_left_is_forgotten_though_its_first_token_is_due_much_later() -> None:
    at = moment()
    waiting = WaitingPrompts(at.policy)
    for number in range(500):
        running = chat(f"left-{number}", 86_400.0)
        waiting.add(running)
        waiting.refresh(NOW, TIMES, at.chunk)
        waiting.remove(running)
    left = [
        running
        for running in gc.get_objects()
        if type(running) is WorkerRequest and running.request.id.startswith("left-")
    ]
    assert len(left) < 100


@pytest.mark.parametrize(("left_s", "expected_s"), [(0.02, 0.02), (0.016, 0.5)])
def test_a_prompt_binds_a_step_where_it_is_in_time_beside_as_many_decodes_as_run(
    left_s: float, expected_s: float
) -> None:
    """A step has places for 10 of the 20 chats. Beside 10 it takes 18 ms, and beside all 25 ms."""
    cost = CostModel({kind: Coefficients(fixed=0.01, decode=1e-4, prefix=1e-5) for kind in Kind})
    decodes = [chat(f"c{number}", 0.5, output=3) for number in range(20)]
    at = StepContext(NOW, cost, TIMES, 2048, 16, 256, Policy(), 256)
    waiting = waits([chat("new", left_s)], at)
    waiting.refresh(NOW, TIMES, at.chunk)
    found = step_bounds(StepView(decodes, (), waiting, at, seating(0, at)), 10)
    assert found.prompts_s == pytest.approx(expected_s)


def test_of_more_decodes_than_a_step_has_places_the_most_urgent_run() -> None:
    decodes = [chat(f"c{number}", 1.0 - number / 10, output=3) for number in range(5)]
    found = select([*decodes, document("d", output=3)], [], [], moment(), most=3)
    assert {running.request.id for running in found.decodes} == {"c2", "c3", "c4"}


def test_a_document_that_no_step_has_a_place_for_rises() -> None:
    policy, later = Policy(age_s=0.5), NOW + 0.6
    long, short = document("long", output=3), document("short", output=3)
    for running, length in ((long, 100), (short, 10)):
        running.request = replace(running.request, estimate=Estimate(length, length))
        running.promise = promise(running.request, policy, 3)
    assert select([long, short], [], [], moment(policy), most=1).decodes == [short]
    short.promise.emitted(later, 4)
    assert select([long, short], [], [], replace(moment(policy), now=later), most=1).decodes == [long]
