"""Define what parts report of themselves for metrics and the live page; a message of the kind `Figures` carries it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.core import Fallback, PreemptionCause, ServiceClass

# Values are counted up to each of these bounds, and beyond the last.
SPREADS = (64, 256, 1_024, 4_096, 16_384)  # tokens
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)  # of what came to what was predicted


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of values by their size, over a worker's life."""

    buckets: tuple[int, ...] = ()  # one for each bound, and one for what is beyond; empty where nothing is counted
    total: float = 0.0  # all values together


@dataclass(frozen=True, slots=True)
class Stages:
    """Counts of open requests by place, as the router knows."""

    unplaced: int = 0
    prefill: int = 0  # with prefill workers
    pool: int = 0
    decode: int = 0  # with decode workers


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Counts of a decode worker's life: steps by what ran together, and what came ahead of need."""

    by_batches: tuple[int, ...] = (0, 0, 0)  # steps with members of no batch, of one, of two or more
    spread: Tally = Tally()
    switches: int = 0  # batches with a member that has joined
    prefetched: int = 0  # requests that joined from a prefill worker's device, and had waited in the pool
    in_vain: int = 0  # requests that joined otherwise, though a prefill worker had fetched the KV, or was to
    held_back: int = 0  # best-effort requests that had memory and sat out a step with real-time ones, once for each
    pauses: int = 0  # of steps, for prompts of chats
    grouped: int = 0  # steps that documents of other lengths sat out


@dataclass(frozen=True, slots=True)
class ByClass:
    rt: int = 0
    be: int = 0


@dataclass(frozen=True, slots=True)
class Preempted:
    """The number of requests of one class that had to leave a worker's steps for one cause."""

    cause: PreemptionCause
    service: ServiceClass
    keeps_kv: bool  # else it is recomputed
    number: int


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The present load of a worker of either kind, and the counts of its life."""

    running: ByClass = ByClass()
    waiting: ByClass = ByClass()
    used: float = 0.0  # share of the device's blocks
    slack_s: float | None = None  # until the most urgent real-time request's next token is due
    step_tokens: Tally = Tally()
    step_s: Tally = Tally()
    step_ratio: Tally = Tally()
    length_ratio: Tally = Tally()
    preempted: tuple[Preempted, ...] = ()
    is_retiring: bool = False  # it takes nothing new, and ends when it is idle


MOST_LENGTHS = 256  # of each class in a message


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prefix lengths of some requests of a decode worker, ascending; where there are many, evenly chosen ones."""

    rt: tuple[int, ...] = ()
    be: tuple[int, ...] = ()
    num_rt: int = 0  # requests, also where the length is left out
    num_be: int = 0


NO_LENGTHS = Lengths()


@dataclass(frozen=True, slots=True)
class DecodeLengths:
    """The requests of a decode worker by their lengths: what runs together, and what joins next."""

    batch: Lengths = NO_LENGTHS  # members of the running batch
    guests: Lengths = NO_LENGTHS  # requests that run beside the batch
    prompts: Lengths = NO_LENGTHS  # prompts that run here, by their lengths
    waiting: Lengths = NO_LENGTHS  # candidate requests, which join before any batch
    coming: Lengths = NO_LENGTHS  # members of the candidate batch
    band: tuple[int, int] | None = None  # of the running batch; without one, the shortest and the longest prefix


@dataclass(frozen=True, slots=True)
class PagesFor:
    """Pages that a pool has lent to a worker, or keeps for requests that run there; a shared page counts for each."""

    worker: str  # empty: for requests that wait in the pool
    leased: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Garbage:
    """The counts of Python's garbage collector for one of its generations."""

    collections: int  # runs of the collector
    collected: int  # objects
    uncollectable: int  # the same, which it had to leave


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """What a GPU does, whoever uses it; None: its driver does not tell."""

    busy: float | None  # share of the time in which a kernel ran
    used_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """What all processes of a machine, or of a container, do together."""

    busy_cores: float | None  # in use since the figures before; None: these are the first
    cores: int
    used_bytes: int
    total_bytes: int
    gpus: tuple[GpuFigures, ...] = ()  # none: there is none, or no driver that tells


def machine_of_each_node(told: Iterable[tuple[str, MachineFigures]]) -> dict[str, MachineFigures]:
    """Return what each node does, from what its parts told, the oldest first.

    The newest counts that knows how busy the node is: an idle part tells nothing new, even after its first reading."""
    return dict(sorted(told, key=lambda of_node: of_node[1].busy_cores is not None))


@dataclass(frozen=True, slots=True)
class EnergyFigures:
    """The energy of a device since its process began, steps or not."""

    joules: float
    rest_joules: float  # of them, those beside steps
    source: str  # nvml, rapl or modelled


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """The facts that the kernel and Python have about a process."""

    cpu_s: float  # processor time of all its threads
    resident_bytes: int
    num_files: int  # open
    started_at: float  # seconds since 1970
    python: str = ""  # its version
    garbage: tuple[Garbage, ...] = ()  # the youngest generation first
    fell_back: tuple[Fallback, ...] = ()  # what it does otherwise, since something does not work there
    weights: str = ""  # how it keeps those of its model, and what that costs
    machine: MachineFigures | None = None  # that the process runs on
    energy: EnergyFigures | None = None  # of the device that it computes on
