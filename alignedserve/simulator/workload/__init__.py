"""Who asks for what, and when: drawn from a seed, and from the names of streams."""

from alignedserve.simulator.workload.load import Load, Mixture, Workload, arrivals
from alignedserve.simulator.workload.visit import Arrival

__all__ = ["Arrival", "Load", "Mixture", "Workload", "arrivals"]
