"""Say decisions and stages of a story in plain sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import TypeAlias

from alignedserve.core import ServiceClass
from alignedserve.explain.decisions import HIDDEN, Decision, Kind, Step
from alignedserve.explain.story import Moment, Stay, Story, StoryStage

PriceOf: TypeAlias = Callable[[float, float], float]  # of seconds of workers and joules; 0: there are no prices
_CLASSES = {ServiceClass.RT: "real-time", ServiceClass.BE: "best-effort"}


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _of(text: str, why: str) -> str:
    return f"{text}: {why}" if why else text


def _after(number: int, noun: str) -> str:
    return "" if number == HIDDEN else f" behind {_counted(number, noun)}"


def _others(number: int, noun: str, why: str) -> tuple[str, str]:
    """Return the number of other requests in words, and their classes; neither for a key that may not see others."""
    return (f"{noun}s", "") if number == HIDDEN else (_counted(number, noun), f" ({why})")


def _predicted(seconds: float) -> str:
    return f", {duration(seconds)} predicted" if isfinite(seconds) else ""


# --- Decisions


def _arrived(noted: Decision) -> str:
    promised = f", promised {noted.why}" if noted.why else ""
    ahead = f"; prompts of {duration(noted.expected_s)} before it" if noted.expected_s > 0 else ""
    attempt = f"attempt {noted.attempt} " if noted.attempt else ""
    tokens = _counted(noted.tokens, "token")
    return f"{attempt}arrived {duration(noted.seconds)} after it came, with {tokens}{promised}{ahead}"


def _placed(noted: Decision) -> str:
    if not noted.number:
        return f"placed on {noted.other}"
    first = f"first token in about {duration(noted.expected_s)}"
    return f"placed on {noted.other}, in line behind {_counted(noted.number, 'prompt')}: {first}"


def _queued(noted: Decision) -> str:
    return f"queued{_after(noted.number, 'prompt')}; {_counted(noted.tokens, 'token')} to compute"


def _behind(noted: Decision) -> str:
    prompts, by_class = _others(noted.number, "other prompt", noted.why)
    tokens = "" if noted.tokens == HIDDEN else f"{_counted(noted.tokens, 'token')} of "
    return f"until then {tokens}{prompts} ran{by_class}"


def _beside(noted: Decision) -> str:
    requests, by_class = _others(noted.number, "other request", noted.why)
    return f"in the {duration(noted.seconds)} until then {requests} decoded{by_class}"


def _length(noted: Decision) -> str:
    if noted.tokens == HIDDEN:
        return "predicted an output as of prompts alike"
    return f"predicted an output of {noted.tokens:,} tokens, nine of ten at most {noted.number:,}"


def _joined(noted: Decision) -> str:
    here = "" if noted.number == HIDDEN else f", one of {_counted(noted.number, 'request')} here"
    return f"decodes from token {noted.tokens + 1:,} on{here}"


def _taken_over(noted: Decision) -> str:
    behind = _after(noted.number, "other candidate")
    return f"taken over from {noted.other} ({noted.why}){behind and f',{behind}'}"


def _chunk(noted: Decision) -> str:
    came = f"{duration(noted.seconds)}{_predicted(noted.expected_s)}"
    return f"step {noted.number} ran {_counted(noted.tokens, 'token')} of its prompt ({came})"


def _displaced(noted: Decision) -> str:
    by = f" to {noted.other}" if noted.other else ", for requests that grow"
    return _of(f"gave up its memory{by}", noted.why)


def _ended(noted: Decision) -> str:
    text = f"ended with {_counted(noted.tokens, 'token')}" if noted.tokens else "ended"
    if not noted.seconds:
        return _of(text, noted.why)
    source = f" ({noted.other})" if noted.other else ""
    used = f"{duration(noted.seconds)} of workers' time, {noted.joules:.3g} J{source}"
    return f"{_of(text, noted.why)}; it used {used}"


_SENTENCES: Mapping[Kind, Callable[[Decision], str]] = MappingProxyType(
    {
        Kind.ARRIVED: _arrived,
        Kind.DECLARED: lambda _: "its owner told it to this router, which had just started",
        Kind.REFUSED: lambda noted: f"refused ({noted.other}): {noted.why}",
        Kind.PREDICTED: _length,
        Kind.PLACED: _placed,
        Kind.MOVED: lambda noted: f"heard that {noted.other} has it",
        Kind.CANCELLED: lambda _: "cancelled: its client has gone, or did not want it any more",
        Kind.REPLACED: lambda _: "replaced by a later attempt",
        Kind.QUEUED: _queued,
        Kind.BEHIND: _behind,
        Kind.BESIDE: _beside,
        Kind.SEATED: lambda noted: f"got memory; {_counted(noted.tokens, 'token')} were in the cache",
        Kind.CHUNK: _chunk,
        Kind.OFFERED: lambda noted: f"its prompt is through: offered to {noted.other}",
        Kind.WRITES: lambda _: "its prompt is through: its KV goes to the pool",
        Kind.COMMITTED: lambda _: "its KV is in the pool, where it waits for a decode worker",
        Kind.CANDIDATE: _taken_over,
        Kind.JOINING: lambda noted: f"got memory; its KV is copied from {noted.other}",
        Kind.JOINED: _joined,
        Kind.DISPLACED: _displaced,
        Kind.DROPPED: lambda _: "dropped here: it was cancelled, or it runs elsewhere",
        Kind.ENDED: _ended,
        Kind.LOST: lambda noted: _of("the attempt is lost: its owner starts another, or gives up after ten", noted.why),
    }
)


def said(noted: Decision, price_of: PriceOf = lambda *_: 0.0) -> str:
    text = _SENTENCES[noted.kind](noted)
    price = price_of(noted.seconds, noted.joules) if noted.kind is Kind.ENDED else 0.0
    return f"{text}, at a price of {price_text(price)}" if price else text


def price_text(price: float) -> str:
    return f"{price:,.2f}" if price >= 0.01 else f"{price:.2g}"


# --- Stages


def _decoded(stay: Stay) -> str:
    first = next((noted.tokens for noted in stay.noted(Kind.JOINED)), 0)
    ends = stay.noted(Kind.ENDED) if stay.next is None else [stay.next]
    last = ends[0].tokens if ends and ends[0].kind in (Kind.ENDED, Kind.DISPLACED) else 0
    num_tokens = max(0, last - first)
    tokens = f" {_counted(num_tokens, 'token')}" if num_tokens else ""
    num_without = len(stay.steps) - num_tokens  # a step in which it ran gave it a token
    without = f"; {num_without:,} of them ran without it" if num_tokens and num_without > 0 else ""
    return f"decoded{tokens} on {stay.part}{_steps(stay.steps)}{without}"


def _steps(steps: Sequence[Step]) -> str:
    """Return how many steps there were, what was predicted of them and what came."""
    if not steps:
        return ""
    num, longest = len(steps), max(steps, key=lambda step: step.seconds)
    predicted, came = (sum(times) / num for times in _times(steps))
    text = f" in {_counted(num, 'step')} of {duration(came)}{_predicted(predicted)}"
    if num == 1:
        return text
    held = [_counted(longest.prompt_tokens, "prompt token")] if longest.prompt_tokens > 0 else []
    held += [_counted(longest.decodes, "decode")] if longest.decodes > 0 else []
    with_these = f" with {' and '.join(held)}" if held else ""
    return f"{text}; the longest {duration(longest.seconds)}, step {longest.number}{with_these}"


def _times(steps: Sequence[Step]) -> tuple[list[float], list[float]]:
    return [step.predicted_s for step in steps], [step.seconds for step in steps]


def _waited(stay: Stay, what: str, kind: Kind, others: str) -> str:
    noted = stay.noted(kind)
    after = _after(noted[0].number, others) if noted else ""
    return f"waited for {what} on {stay.part}{after}{_meanwhile(stay)}"


def _meanwhile(stay: Stay) -> str:
    """Return what ran of other requests during the wait, and where."""
    ran = [moment for moment in stay.moments if moment.decision.kind in (Kind.BEHIND, Kind.BESIDE)]
    return "".join(f"; {said(moment.decision)} on {moment.part}" for moment in ran)


def _prompt(stay: Stay) -> str:
    chunks = stay.noted(Kind.CHUNK)
    predicted, came = sum(chunk.expected_s for chunk in chunks), sum(chunk.seconds for chunk in chunks)
    tokens = _counted(sum(chunk.tokens for chunk in chunks), "token")
    in_steps = f"{_counted(len(chunks), 'step')} of {duration(came)} together{_predicted(predicted)}"
    return f"its prompt ran on {stay.part}: {tokens} in {in_steps}"


def _gave_way(stay: Stay) -> str:
    others = list(dict.fromkeys(noted.other for noted in stay.noted(Kind.DISPLACED) if noted.other))
    to = ", ".join(others) or "requests that grow"
    return f"waited on {stay.part} without memory, which went to {to}{_meanwhile(stay)}"


_STAGES: Mapping[StoryStage, Callable[[Stay], str]] = MappingProxyType(
    {
        StoryStage.ROUTING: lambda _: "waited at the router for a worker",
        StoryStage.QUEUE: lambda stay: _waited(stay, "its turn", Kind.QUEUED, "prompt"),
        StoryStage.PROMPT: _prompt,
        StoryStage.HAND_ON: lambda stay: f"waited on {stay.part} for its KV to go on",
        StoryStage.POOL: lambda stay: f"waited in the pool for a decode worker to ask{_meanwhile(stay)}",
        StoryStage.CANDIDATE: lambda stay: _waited(stay, "memory", Kind.CANDIDATE, "other candidate"),
        StoryStage.COPY: lambda stay: f"its KV was copied to {stay.part}",
        StoryStage.DECODE: _decoded,
        StoryStage.DISPLACED: _gave_way,
    }
)


def said_of_stay(stay: Stay) -> str:
    return _STAGES[stay.stage](stay)


# --- The story


def lines(story: Story, price_of: PriceOf = lambda *_: 0.0) -> Iterator[str]:
    """Yield the story as text: how it ended, its stages, then each decision."""
    yield f"{story.request}: {_CLASSES[story.service]}, {outcome(story)}"
    if story.stays:
        yield ""
        yield "Where the time went:"
        yield from (f"{duration(stay.seconds):>12}  {said_of_stay(stay)}" for stay in story.stays)
    yield ""
    yield "What was decided:"
    for moment in story.moments:
        yield f"{_at(story, moment)}  {moment.part:<10}  {said(moment.decision, price_of)}"
    if story.displaced:
        yield ""
        yield "Requests that gave up memory for it:"
        yield from (f"{_at(story, moment)}  {moment.decision.request} on {moment.part}" for moment in story.displaced)
    yield from missing(story)


def outcome(story: Story) -> str:
    took = duration(story.ended_at - story.began_at)
    match story.end:
        case None:
            return f"open for {took}"
        case Decision(kind=Kind.REFUSED, why=why):
            return f"refused: {why}"
        case Decision(kind=Kind.CANCELLED):
            return f"cancelled after {took}"
        case _:
            return f"ended after {took}"


def missing(story: Story) -> Iterator[str]:
    """Yield what the story may lack."""
    yield from (f"{part} did not answer: what it decided is not shown" for part in story.silent)
    for part in story.forgotten_before:
        yield f"{part} has forgotten what it decided when the request began"


def _at(story: Story, moment: Moment) -> str:
    return f"{moment.decision.at - story.began_at:>10.3f} s"
