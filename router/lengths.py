"""How long outputs will be, by what came of the most similar prompts (ALISE §3.1).

    prompt ─▶ the 8 most similar of the newest 4,096 prompts ─▶ mean of their outputs, weighted by similarity
                └── none is similar, or they have told less than the mean lately ─▶ mean of the newest outputs

Prompts are similar if they have hashes of tokens in common (scheduling/sketch.py). The weight is the fourth power of
their number: a very similar prompt tells more than all others together. For example, one prompt has 40 of 64 hashes in
common and had 200 tokens of output, another has 30 and had 80. The mean is (40⁴ x 200 + 30⁴ x 80) / (40⁴ + 30⁴) = 171
tokens. Of the newest outputs nine in ten were at most 1.6 times as long as predicted, so the upper value is 274.

ALISE has a network for prompts that nothing is similar to. A regression in its place was no closer than the mean on
texts that it had not learnt from. A restart begins anew: eight outputs are enough to begin with.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from statistics import fmean
from struct import iter_unpack

from alignedserve.core import Estimate, Request, Sketch
from alignedserve.scheduling.lengths import LEAST_ENDED, SPREAD, is_exact

MOST_KEPT = 4096  # prompts
NEAREST = 8
COVERED = 0.9  # share of outputs that are no longer than the upper value
_LEAST_SHARED = 16  # one in so many hashes makes prompts similar
_MOST_WITH_HASH = 32  # newest prompts that are found by a hash: a common word tells little
_NEWEST_OUTPUTS = 512  # in the mean
_NEWEST_RATIOS = 256
_LEAST_RATIOS = 16
_NEWEST_GAINS = 64  # predictions by which similar prompts are judged
_MOST_OFF = 8.0  # times: a prediction that is further off counts as much


@dataclass(slots=True)
class _Opened:
    """An open request, and what was predicted for it, in tokens; None where too little was known."""

    hashes: Sequence[int]
    by_mean: float | None
    by_similar: float | None
    said: float | None  # which of both it was


class OutputLengths:
    """Predicts the lengths of outputs, and learns from each that ends."""

    def __init__(self) -> None:
        self._open: dict[str, _Opened] = {}
        self._past = PastPrompts()
        self._outputs = deque[int](maxlen=_NEWEST_OUTPUTS)
        self._ratios, self._upper = deque[float](maxlen=_NEWEST_RATIOS), float(SPREAD)  # of output to prediction
        self._gains = deque[float](maxlen=_NEWEST_GAINS)  # how much closer similar prompts came than the mean

    @property
    def num_open(self) -> int:
        """Return the number of open requests to learn from."""
        return len(self._open)

    def opened(self, request: Request, sketch: Sketch) -> Estimate | None:
        """Return how long the request's output will be, as far as that is known. A request whose output can have one
        length alone tells and learns nothing."""
        if is_exact(request):
            return None
        hashes = [number for (number,) in iter_unpack("<I", sketch.hashes)]
        by_mean = fmean(self._outputs) if len(self._outputs) >= LEAST_ENDED else None
        by_similar = None if by_mean is None else self._past.output_like(hashes)
        said = by_mean if by_similar is None or sum(self._gains) < 0 else by_similar
        self._open[request.id] = _Opened(hashes, by_mean, by_similar, said)
        return None if said is None else _estimate(said, self._upper)

    def ended(self, request: Request, num_output: int) -> None:
        """Learn the length of an output, unless it is empty or was cut off before its predicted length."""
        opened = self._open.get(request.id)
        if opened is None or not num_output or _is_cut_off(request, num_output):
            return
        if opened.by_mean is not None and opened.by_similar is not None:
            self._gains.append(_times_off(opened.by_mean, num_output) - _times_off(opened.by_similar, num_output))
        if opened.said is not None:
            self._ratios.append(num_output / opened.said)
            if (num := len(self._ratios)) >= _LEAST_RATIOS:
                self._upper = sorted(self._ratios)[min(num - 1, int(COVERED * (num + 1)))]
        self._outputs.append(num_output)
        self._past.add(opened.hashes, num_output)

    def closed(self, request: str) -> None:
        self._open.pop(request, None)


class PastPrompts:
    """The newest prompts whose outputs have ended, each found by any of its hashes."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[Sequence[int], int]] = {}  # number -> hashes, and tokens of output
        self._with: dict[int, deque[int]] = {}  # hash -> the numbers of the newest prompts that have it, in order
        self._num_ever = 0

    def add(self, hashes: Sequence[int], num_output: int) -> None:
        """Keep a prompt with its output, in the place of the oldest one."""
        number, self._num_ever = self._num_ever, self._num_ever + 1
        self._prompts[number] = hashes, num_output
        for each in hashes:
            if (found := self._with.get(each)) is None:
                found = self._with[each] = deque(maxlen=_MOST_WITH_HASH)
            found.append(number)
        if len(self._prompts) > MOST_KEPT:
            self._forget(number - MOST_KEPT)

    def output_like(self, hashes: Sequence[int]) -> float | None:
        """Return the mean output of the most similar prompts; None where none is similar."""
        shared = Counter[int]()
        for each in hashes:
            shared.update(self._with.get(each, ()))
        nearest = nlargest(NEAREST, ((num, number) for number, num in shared.items()))
        least = max(1, len(hashes) // _LEAST_SHARED)
        weighed = [(num**4, self._prompts[number][1]) for num, number in nearest if num >= least]
        total = sum(weight for weight, _ in weighed)
        return sum(weight * output for weight, output in weighed) / total if weighed else None

    def _forget(self, oldest: int) -> None:
        hashes, _ = self._prompts.pop(oldest)
        for each in hashes:
            found = self._with[each]
            if found[0] == oldest:  # else newer prompts have taken its place there
                found.popleft()
            if not found:
                del self._with[each]


def _times_off(said: float, output: int) -> float:
    return min(_MOST_OFF, max(said / output, output / said))


def _estimate(mean: float, times: float) -> Estimate:
    upper = max(1, round(mean * times))
    return Estimate(min(upper, max(1, round(mean))), upper)


def _is_cut_off(request: Request, num_output: int) -> bool:
    estimate = request.estimate
    return num_output >= request.max_tokens and estimate is not None and num_output < estimate.mean
