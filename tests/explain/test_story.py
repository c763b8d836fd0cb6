"""The story of a request: what its parts noted, merged into stages, sentences and a trace."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alignedserve.core import ServiceClass
from alignedserve.explain.decisions import Decision, Findings, Kind, Step
from alignedserve.explain.sentences import lines, said, said_of_stay
from alignedserve.explain.story import (
    PartAnswer,
    Story,
    StoryStage,
    clock_lag_s,
    request_named,
    tell,
    without_others,
)
from alignedserve.explain.trace_file import trace_of

ASKED_AT = 100.0


def noted(kind: Kind, at: float, request: str = "a", attempt: int = 0, **fields: Any) -> Decision:
    return Decision(kind, at, request, attempt, ServiceClass.RT, "salt", **fields)


def answer(part: str, *decisions: Decision, steps: tuple[Step, ...] = (), since: float = 0.0) -> PartAnswer:
    return PartAnswer(part, Findings(decisions, steps, since))


ROUTER = answer(
    "router",
    noted(Kind.ARRIVED, 10.0, tokens=300, seconds=0.002, expected_s=0.4, why="a ttft of 1 s"),
    noted(Kind.PLACED, 10.1, other="prefill-0"),
    noted(Kind.MOVED, 11.5, other="decode-0"),
    noted(Kind.ENDED, 13.1),
)
PREFILL = answer(
    "prefill-0",
    noted(Kind.QUEUED, 10.2, number=3, tokens=300),
    noted(Kind.BEHIND, 10.5, number=2, tokens=900, why="1 rt, 1 be"),
    noted(Kind.SEATED, 10.4, tokens=0),
    noted(Kind.CHUNK, 10.8, tokens=200, number=7, seconds=0.3, expected_s=0.25),
    noted(Kind.CHUNK, 11.0, tokens=100, number=8, seconds=0.2, expected_s=0.2),
    noted(Kind.WRITES, 11.0),
    noted(Kind.COMMITTED, 11.1),
)
DECODE = answer(
    "decode-0",
    noted(Kind.BESIDE, 11.2, number=7, seconds=1.2, why="6 rt, 1 be"),
    noted(Kind.CANDIDATE, 11.2, other="pool-0", number=1, seconds=1.2, why="in a batch"),
    noted(Kind.BESIDE, 11.3, number=4, seconds=0.1, why="3 rt, 1 be"),
    noted(Kind.JOINING, 11.3, other="pool-0"),
    noted(Kind.JOINED, 11.4, tokens=1, number=5),
    noted(Kind.DISPLACED, 12.0, other="b", tokens=7, why="it is recomputed"),
    noted(Kind.CHUNK, 12.6, tokens=307, number=90, seconds=0.1, expected_s=0.1),
    noted(Kind.JOINED, 12.6, tokens=8, number=6),
    noted(Kind.ENDED, 13.0, tokens=20, why="stop"),
    steps=(Step(80, 11.4, 0.2, 0.1, 0, 5), Step(81, 11.6, 0.4, 0.1, 512, 5), Step(90, 12.5, 0.1, 0.1, 307, 2)),
)


def told(*answers: PartAnswer, silent: tuple[str, ...] = ()) -> Story:
    return tell("a", answers, silent, ASKED_AT)


def stages(story: Story) -> list[tuple[StoryStage, str, float, float]]:
    return [(stay.stage, stay.part, stay.began_at, stay.ended_at) for stay in story.stays]


def test_its_stages_follow_each_other() -> None:
    story = told(DECODE, ROUTER, PREFILL)
    assert stages(story) == [
        (StoryStage.ROUTING, "router", 10.0, 10.1),
        (StoryStage.QUEUE, "prefill-0", 10.1, 10.5),
        (StoryStage.PROMPT, "prefill-0", 10.5, 11.0),
        (StoryStage.HAND_ON, "prefill-0", 11.0, 11.1),
        (StoryStage.POOL, "prefill-0", 11.1, 11.2),
        (StoryStage.CANDIDATE, "decode-0", 11.2, 11.3),
        (StoryStage.COPY, "decode-0", 11.3, 11.4),
        (StoryStage.DECODE, "decode-0", 11.4, 12.0),
        (StoryStage.DISPLACED, "decode-0", 12.0, 12.5),
        (StoryStage.PROMPT, "decode-0", 12.5, 12.6),
        (StoryStage.DECODE, "decode-0", 12.6, 13.0),
    ]
    assert (story.end, story.began_at, story.ended_at) == (DECODE.findings.decisions[-1], 10.0, 13.0)


def test_each_stage_is_a_sentence_with_what_was_predicted_and_what_came() -> None:
    sentences = [said_of_stay(stay) for stay in told(ROUTER, PREFILL, DECODE).stays]
    assert sentences[1] == (
        "waited for its turn on prefill-0 behind 3 prompts; "
        "until then 900 tokens of 2 other prompts ran (1 rt, 1 be) on prefill-0"
    )
    assert sentences[2] == (
        "its prompt ran on prefill-0: 300 tokens in 2 steps of 500.0 ms together, 450.0 ms predicted"
    )
    assert sentences[7] == (
        "decoded 6 tokens on decode-0 in 2 steps of 300.0 ms, 100.0 ms predicted; the longest 400.0 ms, step 81 with "
        "512 prompt tokens and 5 decodes"
    )
    assert sentences[4] == (
        "waited in the pool for a decode worker to ask; "
        "in the 1.20 s until then 7 other requests decoded (6 rt, 1 be) on decode-0"
    )
    assert sentences[5] == (
        "waited for memory on decode-0 behind 1 other candidate; "
        "in the 100.0 ms until then 4 other requests decoded (3 rt, 1 be) on decode-0"
    )
    assert sentences[8] == "waited on decode-0 without memory, which went to b"
    assert sentences[10] == "decoded 12 tokens on decode-0"


def test_steps_that_ran_without_a_request_that_had_memory_are_counted() -> None:
    steps = tuple(Step(number, 10.0 + number, 0.5, 0.5, 0, 3) for number in range(5))
    ended = answer("decode-0", noted(Kind.JOINED, 10.0, tokens=1), noted(Kind.ENDED, 15.0, tokens=3), steps=steps)
    (stay,) = told(ended).stays
    assert said_of_stay(stay).endswith("; 3 of them ran without it")


def test_the_text_begins_with_the_end_and_has_every_decision() -> None:
    story = told(ROUTER, PREFILL, DECODE)
    text = list(lines(story))
    assert text[0] == "a: real-time, ended after 3.00 s"
    assert sum(" s  " in line for line in text) >= len(story.moments)
    assert any(line.endswith("gave up its memory to b: it is recomputed") for line in text)


def test_every_kind_of_decision_has_a_sentence() -> None:
    story = told(answer("router", *(noted(kind, 10.0) for kind in Kind)))
    assert len(story.moments) == len(Kind)
    assert sum(" s  router " in line for line in lines(story)) == len(Kind)


def test_the_end_tells_the_price_where_there_are_prices() -> None:
    ended = noted(Kind.ENDED, 10.0, tokens=3, seconds=2.0, joules=30.0, other="rapl", why="stop")
    text = "ended with 3 tokens: stop; it used 2.00 s of workers' time, 30 J (rapl)"
    assert said(ended) == text
    assert said(ended, lambda seconds, joules: 1e-3 * seconds + 1e-5 * joules) == f"{text}, at a price of 0.0023"


def test_why_a_request_was_refused() -> None:
    refused = noted(Kind.REFUSED, 10.0, other="too_late", why="it would wait 9.0 s for others")
    story = told(answer("router", refused))
    assert (story.stays, story.end) == ((), refused)
    assert next(lines(story)) == "a: real-time, refused: it would wait 9.0 s for others"


def test_an_open_request_is_in_its_last_stage_until_now() -> None:
    story = told(ROUTER, PREFILL)
    ended = tell("a", [answer("router", *ROUTER.findings.decisions[:2]), PREFILL], (), ASKED_AT)
    assert story.end is not None
    assert (ended.end, ended.stays[-1].stage, ended.stays[-1].ended_at) == (None, StoryStage.POOL, ASKED_AT)


def test_the_next_attempt_begins_at_the_router_again() -> None:
    router = answer(
        "router",
        noted(Kind.ARRIVED, 10.0),
        noted(Kind.PLACED, 10.0, other="decode-0"),
        noted(Kind.LOST, 11.0, other="decode-0"),
        noted(Kind.ARRIVED, 11.5, attempt=1),
        noted(Kind.PLACED, 11.6, attempt=1, other="decode-1"),
        noted(Kind.ENDED, 12.0, attempt=1, other="decode-1"),
    )
    late = answer("decode-0", noted(Kind.CHUNK, 11.2, seconds=0.1))  # it had not heard yet
    story = told(router, late)
    assert [(stay.stage, stay.part) for stay in story.stays] == [
        (StoryStage.ROUTING, "router"),
        (StoryStage.QUEUE, "decode-0"),
        (StoryStage.ROUTING, "router"),
        (StoryStage.QUEUE, "decode-1"),
    ]
    assert story.stays[1].ended_at == 11.0
    assert story.end == router.findings.decisions[-1]


def test_an_attempt_that_was_lost_is_no_end() -> None:
    """Its owner starts the next one at once."""
    story = told(answer("router", noted(Kind.ARRIVED, 10.0), noted(Kind.LOST, ASKED_AT - 1.0)))
    assert story.end is None


def test_an_attempt_that_was_lost_without_a_next_one_is_the_end() -> None:
    """Its owner gave it up, and told nobody."""
    lost = answer("router", noted(Kind.ARRIVED, 90.0), noted(Kind.LOST, 92.0))
    story = told(lost)
    assert story.end is not None
    assert (story.end.kind, story.ended_at) == (Kind.LOST, 92.0)


def test_parts_that_are_silent_or_forget_are_named() -> None:
    text = "\n".join(lines(told(answer("router", noted(Kind.ARRIVED, 10.0), since=10.5), silent=("decode-1",))))
    assert "decode-1 did not answer" in text
    assert "router has forgotten" in text


def test_whom_it_displaced_is_told_apart_from_what_happened_to_it() -> None:
    other = noted(Kind.DISPLACED, 11.0, "b", other="a")
    story = told(answer("decode-0", noted(Kind.JOINED, 11.0), other))
    assert [moment.decision for moment in story.displaced] == [other]
    assert all(moment.decision.request == "a" for moment in story.moments)


@pytest.mark.parametrize(
    ("now", "lag_s"), [(10.2, 0.0), (7.0, 3.0), (15.0, -4.0)], ids=["same clock", "clock behind", "clock ahead"]
)
def test_a_clock_is_moved_by_as_little_as_it_takes(now: float, lag_s: float) -> None:
    assert clock_lag_s(now, asked_at=10.0, heard_at=11.0) == lag_s


def test_times_of_another_clock_are_moved() -> None:
    findings = Findings((noted(Kind.QUEUED, 7.2),), (Step(1, 7.3, 0.1, 0.1, 4, 0),), 7.0)
    story = told(answer("router", noted(Kind.ARRIVED, 10.0)), PartAnswer("decode-0", findings, behind_s=3.0))
    assert story.stays[-1].began_at == pytest.approx(10.2)
    assert story.steps["decode-0"][0].began_at == pytest.approx(10.3)


def test_only_the_key_that_sent_it_owns_it() -> None:
    story = told(ROUTER)
    assert story.is_of("salt")
    assert story.is_of("")
    assert not story.is_of("other")
    assert not told(answer("decode-0", noted(Kind.DISPLACED, 11.0, "b", other="a"))).is_of("")


def test_a_request_is_named_by_the_id_of_its_answer_too() -> None:
    assert [request_named(name) for name in ("chatcmpl-1f", "cmpl-1f", "req-1f")] == ["req-1f"] * 3


def test_the_trace_has_its_stages_each_decision_and_the_steps_of_parts() -> None:
    story = told(ROUTER, PREFILL, DECODE)
    trace = json.loads(trace_of(story))["traceEvents"]
    named = {event["args"]["name"]: event["pid"] for event in trace if event["name"] == "process_name"}
    assert list(named) == ["a", "router", "prefill-0", "decode-0"]
    spans = [event for event in trace if event["ph"] == "X"]
    assert [(event["ts"], event["dur"]) for event in spans if event["cat"] == "stage"][:2] == [
        (0.0, pytest.approx(100_000)),
        (pytest.approx(100_000), pytest.approx(400_000)),
    ]
    assert [event["args"]["step"] for event in spans if event["cat"] == "step"] == [80, 81, 90]
    assert sum(event["ph"] == "i" for event in trace) == len(story.moments)


def in_every_form(story: Story) -> list[str]:
    return [*lines(story), *map(said_of_stay, story.stays), trace_of(story)]


@pytest.mark.parametrize("topic", ["numbers", "steps", "whom"])
def test_a_caller_who_may_not_see_others_reads_none_of_their_numbers(topic: str) -> None:
    """Whatever others did, the story in all its forms is the same."""

    def of(number: int) -> Story:
        of_others: dict[str, Any] = {"number": number, "why": f"{number} rt"} if topic == "numbers" else {}
        seen = number if topic == "numbers" else 1
        in_step = (number, number / 7, number) if topic == "steps" else (1, 0.2, 1)
        chunk = noted(Kind.CHUNK, 10.8, tokens=200, number=7, seconds=0.3, expected_s=in_step[1])
        by = f"b{number}" if topic == "whom" else "b"
        decisions = (
            noted(Kind.ARRIVED, 10.0, tokens=300, expected_s=seen / 9),
            noted(Kind.PREDICTED, 10.0, tokens=seen, number=2 * seen),
            noted(Kind.QUEUED, 10.2, number=seen, tokens=300),
            noted(Kind.BEHIND, 10.5, tokens=seen, **of_others),
            noted(Kind.BESIDE, 10.5, seconds=0.3, **of_others),
            chunk,
            noted(Kind.CANDIDATE, 11.2, other="pool-0", number=seen, seconds=1.2, why="in a batch"),
            noted(Kind.JOINED, 11.4, tokens=1, number=seen),
            noted(Kind.DISPLACED, 12.0, other=by, tokens=7, why="it is recomputed"),
            noted(Kind.DISPLACED, 12.1, request=f"c{number}" if topic == "whom" else "c", other="a"),
            noted(Kind.ENDED, 13.0, tokens=20, why="stop"),
        )
        first, predicted_s, last = in_step
        steps = Step(80, 11.4, 0.2, predicted_s, first, last), Step(81, 11.6, 0.3, predicted_s, first, last)
        return told(answer("router"), answer("decode-0", *decisions, steps=steps))

    assert in_every_form(of(3)) != in_every_form(of(40))
    assert in_every_form(without_others(of(3))) == in_every_form(without_others(of(40)))


def test_what_a_caller_may_not_see_is_left_out_of_its_sentences() -> None:
    text = "\n".join(lines(without_others(told(ROUTER, PREFILL, DECODE))))
    assert "waited for its turn on prefill-0; until then other prompts ran on prefill-0" in text
    assert "queued; 300 tokens to compute" in text
    assert "its prompt ran on prefill-0: 300 tokens in 2 steps of 500.0 ms together\n" in text
    assert "in the 1.20 s until then other requests decoded" in text
    assert "gave up its memory to another request: it is recomputed" in text
    assert "decoded 6 tokens on decode-0 in 2 steps of 300.0 ms; the longest 400.0 ms, step 81" in text
    assert "predicted" not in text
