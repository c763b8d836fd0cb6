"""Loads of chats that several benchmarks share: two traces, and four kinds at the rate that two workers take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from alignedserve.lab.benchmarks.common.simulating import save_load
from alignedserve.lab.reports.trial import SimulationTrial

CHATS = Path(__file__).parents[1] / "data" / "azure_conv.csv"
ANSWERS = CHATS.with_name("bwb_answers.csv")
GPU = "rtx4090-llama-3.1-8b-tp1"
ONE_PLUS_ONE = 0.6  # of the capacity of two colocated workers, at least: a prefill and a decode worker
LOTS = {  # of documents: a lot comes when the lot before has ended
    "name": "documents",
    "service": "be",
    "prompt": "512-1024",
    "output": "32-128",
    "arrivals": "closed",
    "in_flight": 32,
    "num_requests": 100_000,
}


@dataclass(frozen=True)
class NamedLoad:
    """Requests of one kind; `capacity` is what two workers take, in chats per second."""

    workload: str
    capacity: float
    seconds: int = 60

    def trial(self, rate: float, cluster: str = "2xcolocated") -> SimulationTrial:
        return SimulationTrial("aligned", f"{self.workload},first_s={self.seconds}", cluster, 0, rate, GPU)

    def beside_documents(self, path: Path, documents: Mapping[str, object] = MappingProxyType(LOTS)) -> str:
        """Write the same requests with documents beside, and return the name of the file."""
        endless = {} if self.workload.startswith("trace:") else {"rate": 1.0, "num_requests": 100_000}
        return save_load(path, self.seconds, {**endless, **self.stream()}, {**documents})

    def stream(self) -> dict[str, object]:
        """Return the chats as a stream of a workload's file."""
        kind, _, keys = self.workload.partition(":")
        own = {"path": keys} if kind in ("trace", "lengths") else dict(pair.split("=") for pair in keys.split(","))
        return {"name": "chats", "kind": kind, **own}


def loads(chats: Path) -> dict[str, NamedLoad]:
    return {
        "chats": NamedLoad(f"trace:{chats.resolve()}", 8.0),
        "long prompts": NamedLoad("sizes:prompt=lognormal:2048:1900:8000,output=lognormal:28:60:400", 5.0),
        "short chats": NamedLoad("sizes:prompt=exp:80:400,output=exp:60:300", 120.0, 20),
        "conversations": NamedLoad(
            "sizes:prompt=lognormal:150:200:1500,output=lognormal:150:150:800,turns=2-8,system=200,think_s=exp:5:30",
            4.0,
        ),
    }
