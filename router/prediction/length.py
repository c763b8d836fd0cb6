"""What of the length predictor (ALISE §3.1) the router's core decides: whose length is asked for, and what is learnt.

    Submit ─▶ Predict ─ ─ side process ─ ─▶ Predicted ─▶ Expect, to where the request is by then
    Progress(ended) ─▶ Learn, and now and then Retrain

Nothing waits for the answer, which may never come: a prompt is placed at once, and until more is known its output is
expected to be as long as the prior says (lengths.py). What the side process does is in predictor.py.
"""

from __future__ import annotations

from alignedserve.core import Request, Sketch
from alignedserve.protocol.commands import Command, Learn, Predict, Retrain
from alignedserve.scheduling.lengths import bounds
from alignedserve.scheduling.policy import Policy, Predictor

LEARNT = (Predictor.HASH, Predictor.MINILM)
FIRST_TRAINING = 64  # outputs, before the first fit
GROWTH = 1.25  # times as many are there at the next one ...
MOST_BETWEEN = 2000  # ... or so many more: what is old by then says less


class Lengths:
    def __init__(self, policy: Policy) -> None:
        self._is_on = policy.predictor in LEARNT
        self._sketches: dict[str, Sketch] = {}  # of open requests
        self._num_learnt = 0
        self._retrain_at = FIRST_TRAINING

    @property
    def num_open(self) -> int:
        """Requests whose prompts are kept to learn from."""
        return len(self._sketches)

    def opened(self, request: Request, sketch: Sketch | None) -> list[Command]:
        """Its next attempt is asked for again: the answer to the one before may be lost."""
        if not self._is_on or sketch is None or _is_exact(request):
            return []
        self._sketches[request.id] = sketch
        if request.estimate is not None:  # its client said so; what comes of it is learnt all the same
            return []
        return [Predict(request.id, request.attempt, sketch, len(request.prompt))]

    def ended(self, request: Request, num_output: int) -> list[Command]:
        """One that was cut off earlier than predicted says nothing of how long it would have been; nor does 0."""
        sketch = self._sketches.get(request.id)
        if sketch is None or not num_output or _is_cut_short(request, num_output):
            return []
        self._num_learnt += 1
        learn = Learn(sketch, len(request.prompt), num_output)
        if self._num_learnt < self._retrain_at:
            return [learn]
        self._retrain_at = min(int(GROWTH * self._num_learnt), self._num_learnt + MOST_BETWEEN)
        return [learn, Retrain()]

    def closed(self, request: str) -> None:
        self._sketches.pop(request, None)


def _is_exact(request: Request) -> bool:
    least, most = bounds(request)
    return least == most


def _is_cut_short(request: Request, num_output: int) -> bool:
    estimate = request.estimate
    return num_output >= request.max_tokens and estimate is not None and num_output < estimate.mean
