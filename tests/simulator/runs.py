"""Records of runs, written by hand, with defaults for everything that a test does not name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan

from alignedserve.core import Role, ServiceClass, Slo, Usage
from alignedserve.cost.model import Shape
from alignedserve.lab.loads.records.records import CopyRecord, RequestOutcome, RequestRecord, RunRecord, StepRecord

SLO = Slo(ttft_s=1.0, tbt_s=0.2, jct_s=10.0)


def rt(
    name: str, arrival_at: float, *token_at: float, outcome: RequestOutcome = RequestOutcome.FINISHED
) -> RequestRecord:
    """Return the record of a real-time request that ends with its last token."""
    return RequestRecord(
        id=name,
        service=ServiceClass.RT,
        slo=SLO,
        arrival_at=arrival_at,
        num_prompt=10,
        token_at=token_at,
        outcome=outcome,
        ended_at=token_at[-1] if token_at else arrival_at,
    )


def be(
    name: str, arrival_at: float, *token_at: float, outcome: RequestOutcome = RequestOutcome.FINISHED
) -> RequestRecord:
    return replace(rt(name, arrival_at, *token_at, outcome=outcome), service=ServiceClass.BE)


def decode_step(
    began_at: float, seconds: float, prefixes: Sequence[int], predicted_s: float = nan, emitted: tuple[str, ...] = ()
) -> StepRecord:
    shape = Shape.build(prefixes=prefixes)
    return StepRecord("decode-0", began_at, seconds, predicted_s, shape, min(prefixes), 100, 0.25, emitted)


def prefill_step(began_at: float, seconds: float, tokens: int, emitted: tuple[str, ...] = ()) -> StepRecord:
    return StepRecord("decode-0", began_at, seconds, nan, Shape.build([(tokens, 0)]), 0, 100, 0.75, emitted)


def record(
    requests: Sequence[RequestRecord] = (), steps: Sequence[StepRecord] = (), copies: Sequence[CopyRecord] = ()
) -> RunRecord:
    """Return the record of a run of ten seconds that took two to simulate."""
    return RunRecord(0.0, 10.0, 2.0, {"decode-0": Role.DECODE}, list(requests), list(steps), list(copies))


# "quick" is always in time. "late" has its first token after 1.5 s. "halting" has a gap of 0.5 s. "refused" has no
# token. Among the BE requests "soon" takes 4 s, "slow" 10.5 s, and "open" never ends.
MIXED = record(
    requests=[
        rt("quick", 0.0, 0.3, 0.4, 0.5),
        rt("late", 1.0, 2.5, 2.6),
        rt("halting", 2.0, 2.5, 3.0, 3.1),
        rt("refused", 3.0, outcome=RequestOutcome.REFUSED),
        be("soon", 0.0, 3.0, 4.0),
        be("slow", -1.0, 8.0, 9.0, 9.5),
        be("open", 5.0, 9.0, outcome=RequestOutcome.OPEN),
    ],
    steps=[
        prefill_step(0.0, 0.3, 50, emitted=("quick",)),
        decode_step(0.3, 0.1, [10], predicted_s=0.11, emitted=("quick",)),
        decode_step(0.4, 0.1, [11], predicted_s=0.08, emitted=("quick",)),
        prefill_step(2.3, 0.2, 20, emitted=("late", "halting")),
        decode_step(2.5, 0.1, [10, 30, 50], predicted_s=0.1, emitted=("late",)),
        decode_step(2.8, 0.2, [10, 20], emitted=("halting", "soon")),
    ],
    copies=[CopyRecord("decode-0", 4.0, 0.5, True, 64), CopyRecord("decode-0", 5.0, 0.25, False, 32)],
)
MIXED.pool = [Usage(rt=3, be=2, shared=1, idle=4, leased=1, free=9)]
