"""The router core's part of length prediction (ALISE §3.1): which prompts the core asks about, and what is learnt.

    Submit ─▶ Predict ─ ─ side process ─ ─▶ Predicted ─▶ Expect, to the member that has the request by then
    Progress(ended) ─▶ Learn, and now and then Retrain and, of each open request that waits for its end, Predict again

No request waits for the answer, which may never come: the router places a prompt at once, and until then expects an
output as long as the prior says (lengths.py). predictor.py has what the side process does.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.core import Request, ServiceClass, Sketch
from alignedserve.protocol.commands import Command, Learn, Predict, Retrain
from alignedserve.scheduling.lengths import is_exact
from alignedserve.scheduling.policy import Policy, Predictor

FIRST_TRAINING = 16  # outputs that are learnt before the first fit
GROWTH = 1.5  # the next fit comes when there are 1.5 times as many outputs ...
MOST_BETWEEN = 256  # ... or 256 more, since older outputs tell less


@dataclass(slots=True)  # made for every request, and a frozen one takes three times as long
class _AskedLength:
    """The order that asks for an open request's length, and whether the router predicts the length."""

    order: Predict
    is_predicted: bool  # otherwise its client has said it
    is_be: bool


class FitTimes:
    """The times at which the predictor is fitted again, in learnt outputs."""

    def __init__(self) -> None:
        self._num_learnt, self._next = 0, FIRST_TRAINING

    def is_due(self) -> bool:
        """Count an output, and return whether a fit is due after it."""
        self._num_learnt += 1
        if self._num_learnt < self._next:
            return False
        self._next = min(int(GROWTH * self._num_learnt), self._num_learnt + MOST_BETWEEN)
        return True


class PredictionOrders:
    def __init__(self, policy: Policy) -> None:
        self._is_on = policy.predictor is Predictor.HASH
        self._open: dict[str, _AskedLength] = {}
        self._fits = FitTimes()

    @property
    def num_open(self) -> int:
        """Return the number of open requests with sketches to learn from."""
        return len(self._open)

    def opened(self, request: Request, sketch: Sketch | None) -> list[Command]:
        """Ask for the length of a request's output; each attempt asks again, since an answer may have been lost."""
        if not self._is_on or sketch is None or is_exact(request):
            return []
        order = Predict(request.id, request.attempt, sketch, len(request.prompt))
        is_predicted = request.estimate is None  # a length that the client gave is learnt all the same
        self._open[request.id] = _AskedLength(order, is_predicted, request.service is ServiceClass.BE)
        return [order] if is_predicted else []

    def ended(self, request: Request, num_output: int) -> list[Command]:
        """Learn the length of an output, unless it was cut off before its predicted length or is empty."""
        ended = self._open.get(request.id)
        if ended is None or not num_output or _is_cut_short(request, num_output):
            return []
        learn = Learn(ended.order.sketch, ended.order.num_prompt, num_output)
        return [learn, Retrain(), *self._asked_again(request.id)] if self._fits.is_due() else [learn]

    def _asked_again(self, but: str) -> list[Command]:
        """Ask again for best-effort requests, which may wait long: the predictor knows more than on their arrival."""
        return [it.order for name, it in self._open.items() if it.is_be and it.is_predicted and name != but]

    def closed(self, request: str) -> None:
        self._open.pop(request, None)


def _is_cut_short(request: Request, num_output: int) -> bool:
    estimate = request.estimate
    return num_output >= request.max_tokens and estimate is not None and num_output < estimate.mean
