"""The setup of a worker's core, and how the core takes a request in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alignedserve.core import FREE_COPIES, CopyCost, Due, Request, WorkerLimits
from alignedserve.cost.fit import OnlineCost
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import DEFAULT_POLICY, Policy
from alignedserve.worker.step.request import WorkerRequest

if TYPE_CHECKING:
    from alignedserve.cost.promising import LearntPromise  # a core is given one, or none


@dataclass(frozen=True)
class WorkerSetup:
    """The limits, the policy and the knowledge that a worker's core is made with."""

    limits: WorkerLimits
    policy: Policy = DEFAULT_POLICY
    cost: OnlineCost | None = None  # what the worker expects steps to take; learns from each step
    copying: CopyCost = FREE_COPIES  # from the pool to the device
    root: bytes = b""  # names the model and the KV layout; all page hashes begin with this name
    direct: bool = False  # whether KV goes from device to device, to and from members that have a `transport`
    look_ahead: int = 0  # steps that a worker plans while the step before runs: none, or one
    copies_beside: bool = False  # whether a decode worker's copies from the pool go on beside its steps
    energy_source: str = ""  # how the joules of steps are known (machine/energy.py)
    promise: LearntPromise | None = None  # to chats that ask for nothing; None: it is not known, or nobody chats here
    looks_first: bool = False  # whether it measures how fast the machine is now as soon as it is idle
    layers: int = 0  # between which a step can pause; 0: no step pauses

    def __post_init__(self) -> None:
        assert self.limits.most_held is None or self.policy.drops, "by this policy requests keep all"
        assert not (self.look_ahead and self.policy.why_not_ahead), self.policy.why_not_ahead


def running_of(
    policy: Policy, request: Request, output: Sequence[int], due: Due | None = None, decode: str = ""
) -> WorkerRequest:
    """Return a request in a worker's form; `due` is the due that another worker left, `decode` the named worker."""
    return WorkerRequest(request, promise(request, policy, len(output), due), list(output), decode=decode)
