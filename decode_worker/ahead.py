"""Steps that are planned while the one before them runs, so that a device never waits for whoever plans.

    step N      planned ─▶ runs ─────────────────────────▶ its tokens are known
    step N + 1       planned ─▶ waits on the device ─▶ runs ───────────────────▶

What a step brings is not known yet when the one after it is planned, so only what no result can change is planned
ahead: all that decode go on. Whoever is in step N has as its input, in the plan of N + 1, the token that N samples. Who
must end with that token is left out; who turns out to have ended is in N + 1 in vain: what comes of that is dropped,
and its pairs are free when N + 1 has ended. Whose next token the host has a say in (penalties, a grammar: all that have
a History) sits out one step.

Everything else, prompts, who joins or leaves for want of memory, who is paused, is decided as ever: with no step in
flight. Then nothing is planned ahead, and the device waits once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.core import Decode, StepPlan
from alignedserve.cost.model import Shape
from alignedserve.worker.step.running import Blocks, Running


@dataclass
class Ahead:
    """Who is in the step after the one in flight."""

    decodes: list[Decode] = field(default_factory=list)
    going: list[Running] = field(default_factory=list)  # whose these are
    sitting_out: list[Running] = field(default_factory=list)  # they run in the step after that

    @property
    def shape(self) -> Shape:
        return Shape.of(prefixes=[one.start for one in self.decodes])


def ahead_of(plan: StepPlan, residents: Iterable[Running], blocks: Blocks, block_size: int) -> Ahead | None:
    """The step after `plan`, which runs; None where there is no place for somebody's next token."""
    running = {part.request: part for part in plan.decodes}
    ahead = Ahead()
    for one in residents:
        part = running.get(one.request.id)
        if part is None or not one.is_at(part):  # it has joined since
            going = Decode(
                one.request.id,
                one.output[-1],
                one.prefix,
                one.pairs,
                one.request.sampling,
                len(one.output),
                one.history,
                one.from_right,
            )
        elif one.history is not None:
            ahead.sitting_out.append(one)
            continue
        elif part.index + 1 >= one.request.max_tokens:
            continue
        else:
            going = Decode(
                one.request.id,
                None,
                part.start + 1,
                one.pairs,
                part.sampling,
                part.index + 1,
                from_right=one.from_right,
            )
        if going.start >= len(one.pairs) * block_size:
            more = blocks.take(1)
            if more is None:
                return None
            one.add_pairs(more)
            going.pairs = one.pairs
        ahead.decodes.append(going)
        ahead.going.append(one)
    return ahead
