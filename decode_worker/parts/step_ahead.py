"""Steps that are planned while the one before them runs, so that a device never waits for its worker.

    step N      planned ─▶ runs ─────────────────────────▶ its tokens are known
    step N + 1       planned ─▶ waits on the device ─▶ runs ───────────────────▶

What a step brings is not known yet when the one after it is planned, so only what no result can change is planned
ahead: all that decode go on. A request in step N has as its input, in the plan of N + 1, the token that N samples. A
request that must end with that token is left out; one that turns out to have ended is in N + 1 in vain: what comes of
that is dropped, and its pairs are free when N + 1 has ended. A request whose next token the host has a say in
(penalties, a grammar: all that have a History) sits out one step.

Everything else, prompts, requests that join, leave for lack of memory or are paused, is decided as ever: with no step
in flight. Then nothing is planned ahead, and the device waits once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.core import Decode, StepPlan
from alignedserve.cost.model import Shape
from alignedserve.worker.step.running import Blocks, Running


@dataclass
class StepAhead:
    """The step after the one in flight."""

    decodes: list[Decode] = field(default_factory=list)
    going: list[Running] = field(default_factory=list)  # the requests of these decodes
    sitting_out: list[Running] = field(default_factory=list)  # they run in the step after that

    @property
    def shape(self) -> Shape:
        return Shape.build(prefixes=[decode.start - decode.dropped for decode in self.decodes])


def ahead_of(plan: StepPlan, residents: Iterable[Running], blocks: Blocks, block_size: int) -> StepAhead | None:
    """Return the step after `plan`, which runs, or None where some request has no place for its next token."""
    in_step = {part.request: part for part in plan.decodes}
    ahead = StepAhead()
    for running in residents:
        part = in_step.get(running.request.id)
        if part is None or not running.is_at(part):  # it has joined since
            decode = decode_of(running)
        elif running.history is not None:
            ahead.sitting_out.append(running)
            continue
        elif part.index + 1 >= running.request.max_tokens:
            continue
        else:
            decode = _next_of(part, running)
        if decode.start - decode.dropped >= len(running.pairs) * block_size:
            more = blocks.take(1)
            if more is None:
                return None
            running.add_pairs(more)
            decode.pairs = running.pairs
        ahead.decodes.append(decode)
        ahead.going.append(running)
    return ahead


def decode_of(running: Running) -> Decode:
    """Return the decode of a request whose newest token is known."""
    request, output = running.request, running.output
    return Decode(
        request.id,
        output[-1],
        running.prefix,
        running.pairs,
        request.sampling,
        len(output),
        running.history,
        running.from_right,
        running.dropped,
        adapter=request.adapter,
    )


def _next_of(part: Decode, running: Running) -> Decode:
    """Return the decode after `part`, whose token is not known yet."""
    return Decode(
        part.request,
        None,
        part.start + 1,
        running.pairs,
        part.sampling,
        part.index + 1,
        from_right=running.from_right,
        dropped=running.dropped,
        adapter=part.adapter,
    )
