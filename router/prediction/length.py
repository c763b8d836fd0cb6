"""The router core's part of length prediction (ALISE §3.1): which prompts it asks about, and what is learnt.

    Submit ─▶ Predict ─ ─ side process ─ ─▶ Predicted ─▶ Expect, to the member that has the request by then
    Progress(ended) ─▶ Learn, and now and then Retrain

No request waits for the answer, which may never come: the router places a prompt at once, and until it knows more it
expects an output as long as the prior says (lengths.py). predictor.py has what the side process does.
"""

from __future__ import annotations

from alignedserve.core import Request, Sketch
from alignedserve.protocol.commands import Command, Learn, Predict, Retrain
from alignedserve.scheduling.lengths import bounds
from alignedserve.scheduling.policy import Policy, Predictor

LEARNT = (Predictor.HASH, Predictor.MINILM)
FIRST_TRAINING = 64  # outputs that are learnt before the first fit
GROWTH = 1.25  # the next fit comes when there are so many times as many outputs ...
MOST_BETWEEN = 2000  # ... or so many more, since older outputs tell less


class PredictionOrders:
    def __init__(self, policy: Policy) -> None:
        self._is_on = policy.predictor in LEARNT
        self._sketches: dict[str, Sketch] = {}  # open request -> sketch of its prompt
        self._num_learnt = 0
        self._retrain_at = FIRST_TRAINING

    @property
    def num_open(self) -> int:
        """Return the number of open requests whose sketches are kept to learn from."""
        return len(self._sketches)

    def opened(self, request: Request, sketch: Sketch | None) -> list[Command]:
        """Ask for the length of a request's output; each attempt asks anew, since an answer may have been lost."""
        if not self._is_on or sketch is None or _is_exact(request):
            return []
        self._sketches[request.id] = sketch
        if request.estimate is not None:  # the client gave an estimate; the actual length is learnt all the same
            return []
        return [Predict(request.id, request.attempt, sketch, len(request.prompt))]

    def ended(self, request: Request, num_output: int) -> list[Command]:
        """Learn the length of an output, unless it was cut off before its predicted length or is empty."""
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
