"""The nodes of a Ray cluster, as the launcher sees them: each looks at itself (preflight.py) before a part is placed
there, one that cannot serve is left out, and in the end a table tells what runs where and what is not used.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import groupby
from threading import Thread
from typing import Any

from alignedserve.config.choices import TransportName
from alignedserve.config.config import Config
from alignedserve.core import WORKERS, Role
from alignedserve.launch.host import say
from alignedserve.launch.placing import NAMED, ClusterNode, NodeType, Placing, may_come
from alignedserve.launch.preflight import Asked, Finding, NodeReport, Presence, look_by_json
from alignedserve.launch.roles import NodeOffer
from alignedserve.protocol.messages import rank_of

LOOK_S = 0.5  # between two looks at the nodes of a cluster
ASK_S = 15.0  # for a node to start a process and look at itself
_SSH, _SSH_S = 22, 3.0
_CLOCK_S = 1.0  # by which clocks may differ: requests carry the times at which tokens are due


class ClusterNodes:
    """What each node told of itself: once, when it has come."""

    def __init__(
        self,
        ray: Any,
        asked: Asked,
        types: Sequence[NodeType] = (),
        expected: Collection[str] = (),
        least: int = 0,
    ) -> None:
        """`expected` are addresses of machines that are to join, from the file of `ray up`, and `least` is how many
        nodes for workers it has at least."""
        self._ray, self._asked, self._types, self._expected, self._least = ray, asked, types, expected, least
        self._reports: dict[str, NodeReport] = {}  # by Ray's id of the node
        self._said: set[str] = set()

    def serve(self, model: str, num_bytes: int) -> None:
        """Ask nodes that come from now on for this model, which has so many bytes."""
        self._asked = replace(self._asked, model=model, model_bytes=num_bytes)

    @property
    def left_out(self) -> set[str]:
        return {node for node, report in self._reports.items() if not report.serves}

    def report(self, node: ClusterNode) -> NodeReport:
        return self._reports.get(node.id, _NOTHING)

    def all(self) -> list[ClusterNode]:
        return [
            ClusterNode(node["NodeManagerAddress"], node["Resources"], node.get("NodeID", ""))
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def there(self) -> list[ClusterNode]:
        """Return the nodes that can serve."""
        found, left_out = self.all(), self.left_out
        return [node for node in found if node.id not in left_out]

    def placing(self, config: Config) -> Placing:
        nodes, coming = self.there(), may_come(self._types, self.all())
        may_travel = config.transport in (TransportName.COLLECTIVE, TransportName.DIRECT) or config.topology.colocated
        ranks = config.engine.tensor_parallel_size
        return Placing(nodes, config.ray.gpus_per_worker or 0.0, may_travel, ranks, coming)

    def offers(self, nodes: Sequence[ClusterNode]) -> list[NodeOffer]:
        offers = list[NodeOffer]()
        for node in nodes:
            has, gpus = node.total, self.report(node).gpus
            named = {role: int(has[NAMED[role]]) for role in WORKERS if NAMED[role] in has}
            offers.append(NodeOffer(node.name, has.get("CPU", 0.0), has.get("GPU", 0.0), gpus, named))
        return offers

    def least_gpu(self) -> int | None:
        """Return the bytes of the smallest GPU of nodes that can serve; None where no driver tells."""
        sizes = [size for node in self.there() if (size := self.report(node).gpus.total_bytes) is not None]
        return min(sizes, default=None)

    # --- Looking

    def look(self) -> None:
        """Have each node that is new look at itself, and say what it lacks."""
        new = [node for node in self.all() if node.id not in self._reports]
        if not new:
            return
        with _Listener(self._ray.util.get_node_ip_address()) as at:
            asked = json.dumps(asdict(replace(self._asked, listens_at=at)))
            ask = self._ray.remote(num_cpus=0, max_retries=0)(look_by_json)
            on = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            since = time.time()
            runs = {node.id: ask.options(scheduling_strategy=on(node.id, soft=False)).remote(asked) for node in new}
            self._ray.wait([*runs.values()], num_returns=len(runs), timeout=ASK_S)
            for node in new:
                self._hear(node, self._answer(runs[node.id]), since, time.time())

    def _answer(self, run: Any) -> NodeReport:
        try:
            return NodeReport.from_json(self._ray.get(run, timeout=0))
        except Exception as error:  # Ray raises errors of many kinds, and those of the node's own code
            what = f"it does not look at itself within {ASK_S:g} s ({type(error).__name__})"
            how = "see ~/alignedserve/ray.log there, and that it has the same AlignedServe and Python"
            return NodeReport((Finding("answer", Presence.MISSING, what, how),))

    def _hear(self, node: ClusterNode, report: NodeReport, since: float, until: float) -> None:
        off_s = max(since - report.now, report.now - until, 0.0)
        if report.now and off_s > _CLOCK_S:
            what = f"its clock is {off_s:.0f} s {'behind' if report.now < since else 'ahead'}"
            late = Finding("clock", Presence.ABSENT, what, "keep clocks together: apt-get install chrony")
            report = replace(report, findings=(*report.findings, late))
        self._reports[node.id] = report
        for finding in report.faults:
            self._tell(node.name, finding)

    def _tell(self, name: str, finding: Finding) -> None:
        line = f"fault: {name}: {finding.fault}"
        if line not in self._said:
            self._said.add(line)
            say(line)

    def awaited(self) -> list[str]:
        """Return the machines that are still to join, without those that do not answer to SSH: `ray up` sets up none
        of these."""
        found, awaited = self.all(), list[str]()
        there, of_workers = {node.name for node in found}, sum(node.total.get("CPU", 0.0) >= 1 for node in found)
        if of_workers < self._least:
            awaited.append(f"{self._least - of_workers} more nodes")
        for address in sorted(set(self._expected) - there):
            try:
                socket.create_connection((address, _SSH), _SSH_S).close()
                awaited.append(address)
            except OSError as error:
                what = f"it cannot be reached by SSH from the head ({error.strerror or error})"
                how = "see that it runs, and its address, user and key in the file of `ray up`; then `ray up` again"
                self._tell(address, Finding("ssh", Presence.MISSING, what, how))
        return awaited

    def lacking(self, name: str) -> list[str]:
        """Return what the node lacks without which it cannot serve."""
        reports = [self.report(node) for node in self.all() if node.name == name]
        return [each.fault for report in reports for each in report.faults if each.state is Presence.MISSING]

    # --- The table

    def table(self, config: Config, placed: Mapping[str, str], here: Sequence[str]) -> Iterator[str]:
        """Yield a line for each node, for the roads of KV, and for what is not used; `placed` is part -> id of its
        node, and `here` are the parts of the launcher's own node."""
        own = self._ray.get_runtime_context().get_node_id()
        per_worker = config.ray.gpus_per_worker or 0.0
        nodes = sorted(self.all(), key=lambda node: (node.id != own, node.name))
        for node in nodes:
            ranks = [part for part, at in placed.items() if at == node.id and not part.startswith(Role.POOL.value)]
            parts = [part for part, at in placed.items() if at == node.id and not rank_of(part)]
            report, gpus = self.report(node), node.total.get("GPU", 0.0)
            has = f"{gpus:g} x {report.gpus.name or 'GPU'}" if gpus else f"{node.total.get('CPU', 0.0):g} CPUs"
            listed = _listed([*(here if node.id == own else ()), *parts]) or "nothing"
            yield f"node {node.name}: {listed}; {has}"
            idle = gpus - per_worker * len(ranks)
            if idle > 0:
                yield f"not used: {idle:g} of the {gpus:g} GPUs of {node.name}: {self._why_idle(node, config)}"
            elif not ranks and (self.lacking(node.name) or node.total.get("CPU", 0.0) >= 1):
                yield f"not used: {node.name}: {self._why_idle(node, config)}"
        there = {node.name for node in nodes}
        for address in sorted(set(self._expected) - there):
            yield f"not used: {address}: it has not joined the cluster"
        yield f"roads of KV: {self._roads(config, nodes, placed)}"

    def _why_idle(self, node: ClusterNode, config: Config) -> str:
        if lacking := self.lacking(node.name):
            return lacking[0]
        if node.total.get("GPU") and not config.engine.on_gpu:
            return f"workers compute on the CPU (engine.device {config.engine.device.value})"
        if config.engine.on_gpu and not node.total.get("GPU"):
            return "it has no GPU, and workers compute on GPUs"
        if node.total.get("CPU", 0.0) < 1:
            return "Ray was started there without CPUs, and each rank needs one: `ray start --num-cpus`, one a GPU"
        ranks = config.engine.tensor_parallel_size
        each = f" of {ranks} ranks each" if ranks > 1 else ""
        return f"topology {config.topology} has no more workers{each} that fit there"

    def _roads(self, config: Config, nodes: Sequence[ClusterNode], placed: Mapping[str, str]) -> str:
        if config.topology.colocated:
            return "none is needed: each worker runs the prompts that it decodes"
        links = {report.gpus.link for node in nodes if (report := self.report(node)).gpus.link}
        rdma = all(self.report(node).rdma for node in nodes if node.id in placed.values())
        direct = f"GPUs have {' and '.join(sorted(links))}" if links else ""
        between = f"nodes have {'RDMA' if rdma else 'no RDMA'}" if len(set(placed.values())) > 1 else ""
        has = f" ({'; '.join(filter(None, (direct, between)))})" if direct or between else ""
        name = "NCCL" if config.engine.on_gpu else "Gloo"
        if config.transport is TransportName.DIRECT:
            return f"memory mapped within a node, {name} between nodes, and the KV pool of each node{has}"
        if config.transport is TransportName.COLLECTIVE:
            return f"{name} between all workers, and the KV pool of each node{has}"
        by_pool = config.transport is TransportName.HOST or (config.transport is TransportName.AUTO and config.lends)
        if not by_pool:
            return f"memory mapped from worker to worker where a node's allow it, else its KV pool{has}"
        return f"the KV pool of each node, in the host's memory{has}"


_NOTHING = NodeReport(())


def _listed(parts: Sequence[str]) -> str:
    """Return names with numbers together: decode-0 and decode-1 are decode-0..1."""

    def key(part: str) -> tuple[str, int]:
        name, _, number = part.rpartition("-")
        return (name, int(number)) if number.isdigit() else (part, 0)

    parts, found = sorted(parts, key=key), list[str]()
    for name, group in groupby(parts, lambda part: key(part)[0]):
        numbers = [key(part)[1] for part in group]
        if len(numbers) > 2 and numbers == [*range(numbers[0], numbers[-1] + 1)]:
            found.append(f"{name}-{numbers[0]}..{numbers[-1]}")
        else:
            found += [part for part in parts if key(part)[0] == name]
    return ", ".join(found)


class _Listener:
    """Accepts connections at a free port of this address as long as nodes look."""

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0))
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                self._socket.accept()[0].close()

    def __enter__(self) -> str:
        host, port = self._socket.getsockname()
        return f"{host}:{port}"

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
