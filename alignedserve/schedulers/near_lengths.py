"""Choose which decodes of documents share a step: the set that makes tokens cheapest (AlignedServe §2.2, §3.3).

A step reads the KV of all its decodes, and all decodes wait for the step. So a long document beside many short jobs
makes the jobs' tokens dearer. Several steps may then be better than one:

    in order     [ 100 short, 20 long ] 33 ms                                      3,600 tokens/s
    by length    two [ 100 short, 20 long ] 33 ms each, then [ 100 short ] 15 ms   4,200 tokens/s

The cost model, which each worker fits to its own steps, says where: from the longest on, decodes are left out while
this makes the step's tokens cheaper. A chunk of a prompt belongs to the step; beside a large chunk decodes are cheap,
and all run. Where both halves of a step take less time than the whole, the halves take turns, and no request loses.
Otherwise a document loses pace so that others gain tokens, within limits:

- The document keeps four fifths of its pace.
- Only for jobs that arrived after the document's prompt began: work that came together ends with its longest requests.
- Only while requests wait for time, and as much memory is free as the document holds: else it should end soon.
- Steps with decodes of chats are filled by promises alone.

Gain, simulated on one device (RTX PRO 6000): documents of 4,000 to 16,000 tokens beside 120 short jobs in flight, +4 to
+20 % of all tokens, and documents make 0.84 to 0.93 of theirs (2026-11-29, three seeds); as 1+2
0 to +9 %, with short outputs +6 %; 0 on an RTX 4090, where memory is short, and on the 17 loads of rules.py there.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.cost.model import CostModel, Shape
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep, StepView, shape_of

OF_IN_ORDER = 1.25  # the mean time between two tokens of a document that is left out / the same in order


class NearLengths:
    """Leaves the longest decodes of documents out of steps, and counts the time for which that is still allowed."""

    def __init__(self) -> None:
        self._left_s = 0.0  # for which documents may still be left out
        self._ran = frozenset[str]()  # the first half of a step, while the other half is to run

    @property
    def leaves_some_out(self) -> bool:
        """Return whether the next step may have other decodes than the last, though the same requests are here."""
        return bool(self._ran) or self._left_s > 0.0

    def choose(self, found: PlannedStep, view: StepView) -> PlannedStep:
        """Return the step as found, or without the longest decodes where that makes tokens cheaper."""
        ran, self._ran = self._ran, frozenset()
        if ran:
            rest = [running for running in found.decodes if running.request.id not in ran]
            return found if found.chunks or _has_chat(found) else _only(found, rest, view)
        near, far = split_by_length(found, view.at.cost)
        if not far or _has_chat(found):
            self._left_s = 0.0
            return found
        first = _only(found, near, view)
        if not found.chunks and first.predicted_s + _only(found, far, view).predicted_s <= found.predicted_s:
            self._ran = frozenset(running.request.id for running in near)
            return first
        if not (_wait_for_time(far, view) and _came_later(near, far, found, view.at.now)):
            self._left_s = 0.0
            return found
        if first.predicted_s <= self._left_s:
            self._left_s -= first.predicted_s
            return first
        self._left_s += (OF_IN_ORDER - 1.0) * found.predicted_s
        return found


def split_by_length(found: PlannedStep, cost: CostModel) -> tuple[list[WorkerRequest], list[WorkerRequest]]:
    """Return the decodes with the cheapest tokens together, which are the shortest, and the others."""
    shape = found.shape
    if shape.decodes < 2 or not _may_be_cheaper(shape, found.predicted_s, cost):
        return [*found.decodes], []
    by_length = sorted(found.decodes, key=_length)
    near, best, prefixes = len(by_length), found.predicted_s / len(by_length), shape.prefixes
    for left in range(near - 1, 0, -1):
        prefixes -= _length(by_length[left])
        shape = shape._replace(decodes=left, prefixes=prefixes, longest=_length(by_length[left - 1]))
        token_s = cost.seconds(shape) / left
        if token_s < best:
            near, best = left, token_s
        elif near > left + 1:  # the least is behind
            break
    return by_length[:near], by_length[near:]


def _may_be_cheaper(shape: Shape, seconds: float, cost: CostModel) -> bool:
    """Return whether tokens would be cheaper without the longest decode, if all others were equally long."""
    others, prefixes = shape.decodes - 1, shape.prefixes - shape.longest
    without = shape._replace(decodes=others, prefixes=prefixes, longest=prefixes // others)
    return cost.seconds(without) * shape.decodes < seconds * others


def _only(found: PlannedStep, decodes: Sequence[WorkerRequest], view: StepView) -> PlannedStep:
    """Return the step with its chunks and these decodes alone."""
    if not decodes:
        return found
    shape = shape_of(found.chunks, decodes)
    seconds = view.at.cost.seconds(shape)
    return PlannedStep(decodes, found.chunks, shape, seconds, found.admitted, found.displaced, is_grouped=True)


def _has_chat(found: PlannedStep) -> bool:
    return any(running.promise.is_rt for running in found.decodes)


def _wait_for_time(far: Sequence[WorkerRequest], view: StepView) -> bool:
    """Return whether requests wait here, and not for memory: as much as the longest decodes hold is free."""
    seating = view.seating
    are_waiting = seating.seats <= 0 or bool(view.waiting)
    return are_waiting and seating.blocks.num_free * seating.block_size > sum(map(_length, far))


def _came_later(near: Sequence[WorkerRequest], far: Sequence[WorkerRequest], found: PlannedStep, now: float) -> bool:
    """Return whether a request of `near` arrived after all prompts of `far` had begun, and none of `far` must hurry."""
    newest = max([running.request.arrival_at for running in near])
    hurries_at = now + 2 * OF_IN_ORDER * found.predicted_s
    return all(
        running.request.arrival_at + (running.waited_s or 0.0) < newest and running.promise.due_at(now) > hurries_at
        for running in far
    )


def _length(running: WorkerRequest) -> int:
    return running.num_held
