"""The settings of a simulation: a deployment, its workload and its faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from alignedserve.config.topology import Topology
from alignedserve.core import FREE_COPIES, CopyCost, Role, WorkerLimits
from alignedserve.cost.fit import OnlineCost
from alignedserve.lab.loads.workload import Mixture, Workload
from alignedserve.lab.simulator.machines.engine import Costs, Timing
from alignedserve.lab.simulator.machines.faults import JOBS, Fault
from alignedserve.lab.simulator.machines.world import NetworkDelays
from alignedserve.protocol.extents import Extents
from alignedserve.protocol.messages import ROUTER
from alignedserve.router.placing.admission import Queues
from alignedserve.router.sizing import Sizes
from alignedserve.scheduling.policy import Policy

FIRST_ARRIVAL_AT = 2.0  # by then all members know each other


@dataclass(frozen=True)
class Settings:
    """A simulated deployment, its workload and its faults."""

    seed: int = 0
    topology: Topology = Topology()  # noqa: RUF009  (frozen)
    num_gateways: int = 1
    has_job_runner: bool = False
    workload: Workload | Mixture = Workload()  # noqa: RUF009
    limits: WorkerLimits = WorkerLimits(num_blocks=256, block_size=16, page_size=64, max_step_tokens=512, max_batch=32)  # noqa: RUF009
    policy: Policy = Policy()  # noqa: RUF009
    num_pages: int = 256  # of the pool, in the format that requests are stored in
    extents: Extents | None = None  # of the pool, where it has pages of more than one kind
    most_open: int = 100_000
    queues: Queues = Queues()  # noqa: RUF009
    death_s: float = 3.0
    direct: bool = False  # whether prefill workers send KV straight to decode workers; if not, only through the pool
    nodes: int = 1  # with a pool and workers, in turn; from two on, the last prefill worker is on a node without a pool
    timing: Timing = Costs()  # noqa: RUF009
    belief: Callable[[], OnlineCost] | None = None  # builds the cost model that a worker starts with
    copying: CopyCost = FREE_COPIES  # what a worker believes that copies to its device take
    gateway_s: float = 0.0  # from a client request's arrival to acceptance, without the network
    checked: bool = True  # whether wrong KV is noticed, frames are bytes, and clients are kept after their end
    network: NetworkDelays = NetworkDelays()  # noqa: RUF009
    faults: tuple[Fault, ...] = ()
    most_s: float = 3600.0  # the run ends then; a request that is still open counts as lost
    record: bool = False  # whether steps and copies are recorded, for `Simulation.record`
    look_ahead: int = 0  # steps that workers plan ahead
    layers: int = 0  # between which a worker's step can pause, as on a CPU
    copies_beside: bool = False  # whether copies from the pool go on beside the steps of decode workers
    sizes: Sizes = Sizes()  # noqa: RUF009  the range in which the router adapts the number of workers
    start_s: float = 1.0  # that a new worker takes to start
    drain_s: float = 10.0  # that a retired worker may take to end

    @property
    def pool_extents(self) -> Extents:
        return self.extents or Extents(self.num_pages)

    @property
    def lends(self) -> bool:
        """Return whether prefill workers decode what is near them while they have room."""
        return self.policy.prefill_decodes and not self.topology.colocated


def members_of(settings: Settings) -> dict[str, Role]:
    topology = settings.topology
    names = {ROUTER: Role.ROUTER, **{f"pool-{number}": Role.POOL for number in range(settings.nodes)}}
    names |= {f"prefill-{number}": Role.PREFILL for number in range(topology.prefill_workers)}
    names |= {f"decode-{number}": Role.DECODE for number in range(topology.decode_workers)}
    names |= {JOBS: Role.JOBS} if settings.has_job_runner else {}
    return names | dict.fromkeys(gateways_of(settings), Role.GATEWAY)


def node_of(name: str, role: Role, settings: Settings) -> str:
    number = int(name.rpartition("-")[2]) if role in (Role.POOL, Role.PREFILL, Role.DECODE) else 0
    if role is Role.PREFILL and settings.nodes > 1 and number == settings.topology.prefill_workers - 1:
        return "without a pool"
    return "local" if settings.nodes == 1 else f"node-{number % settings.nodes}"


def gateways_of(settings: Settings) -> tuple[str, ...]:
    return tuple(f"gateway-{number}" for number in range(settings.num_gateways))
