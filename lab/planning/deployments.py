"""Deployments that a user may choose between, with what they cost.

colocated    1x, 2x, 3x ... workers that run prompts and decodes
parted       1+1, 1+2, 2+2 ... each size adds one worker, so that prompts keep about their share of the workers
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.config.topology import Topology


@dataclass(frozen=True, order=True, slots=True)
class DeviceOffer:
    """A device that can be had, and its price. A worker is one device."""

    device: str  # as --profile takes it
    gpu_price: float  # an hour
    gpus: int = 1  # of a worker

    @property
    def price(self) -> float:
        """Return the price of a worker, an hour."""
        return self.gpu_price * self.gpus


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    offer: DeviceOffer
    topology: Topology

    @property
    def size(self) -> int:
        """Return the number of workers."""
        return self.topology.prefill_workers + self.topology.decode_workers

    @property
    def gpus(self) -> int:
        return self.size * self.offer.gpus

    @property
    def price(self) -> float:
        return self.size * self.offer.price

    @property
    def neighbours(self) -> tuple[PlannedDeployment, ...]:
        """Return the deployments with one worker fewer of a kind, and the one with one more of each kind."""
        prefill, decode = self.topology.prefill_workers, self.topology.decode_workers
        if self.topology.colocated:
            sizes = [(0, decode - 1), (0, decode + 1)]
        else:
            sizes = [(prefill - 1, decode), (prefill, decode - 1), (prefill + 1, decode), (prefill, decode + 1)]
        least = 0 if self.topology.colocated else 1
        return tuple(
            PlannedDeployment(self.offer, Topology(prompts, decodes))
            for prompts, decodes in sizes
            if prompts >= least and decodes >= 1
        )

    def __str__(self) -> str:
        return f"{self.topology} of {self.offer.device}"


@dataclass(frozen=True, slots=True)
class DeploymentFamily:
    """Deployments of one device and one kind that differ in size. What a size keeps, a larger size keeps too."""

    offer: DeviceOffer
    prompt_share: float | None  # of the workers, for prompts alone; None: colocated
    least: int  # workers; fewer cannot do the work, by the estimate
    likely: int  # workers that are probably enough

    def of_size(self, size: int) -> PlannedDeployment:
        if self.prompt_share is None:
            return PlannedDeployment(self.offer, Topology(0, size))
        prompts = min(size - 1, max(1, round(size * self.prompt_share)))
        return PlannedDeployment(self.offer, Topology(prompts, size - prompts))

    @property
    def kind(self) -> str:
        return "colocated" if self.prompt_share is None else "P+D"

    def __str__(self) -> str:
        return f"{self.offer.device}, {self.kind}"
