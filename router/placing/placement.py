"""Which worker runs a prompt, and which decode worker it is to go on to.

A prompt goes to the worker where its first token is predicted first, behind the prompts that run before it there. For
a real-time one those are real-time ones alone, where promises decide. What a pool has of a prompt's beginning is not
computed again by the workers of its node: where several nodes have pools, those that had it before have less to do
(beginnings.py). It goes on to a decode worker of that node where one has room, else to the node where one has most:
there it comes by the collective transport, and stays there.

    prompts pile up    decode workers that have room take some of chats
    decodes pile up    there is no room left on decode workers, which take none

Best-effort prompts are not taken: they would keep the decode worker from those that wait for it in the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from alignedserve.core import WORKERS, Request, Role, ServiceClass
from alignedserve.protocol.messages import Backlog, Member, Report
from alignedserve.router.placing.admission import Ahead
from alignedserve.router.placing.beginnings import Beginnings
from alignedserve.router.placing.loads import Loads
from alignedserve.router.placing.rooms import Rooms
from alignedserve.scheduling.lengths import expected
from alignedserve.scheduling.policy import Grouping, Policy

PILED_TTFT = 0.5  # of its ttft that a real-time prompt would wait for others: they have piled up
Pools: TypeAlias = Mapping[str, str]  # node -> its pool
_NOWHERE: Mapping[str, int] = {}
_LESS = 0.5  # of that wait is what a decode worker must promise to be worth it: it has its decodes to run


class Placement:
    def __init__(self, policy: Policy, block_size: int, kv_tokens: int) -> None:
        """`kv_tokens`: that a decode worker's device holds; 0: not known."""
        self._policy, self._kv_tokens = policy, kv_tokens
        self._num_at: Counter[str] = Counter()  # member -> requests that it has
        self._backlogs: dict[str, Backlog] = {}  # worker -> the prompts before it, those sent since it told included
        self._loads = {(role, service): Loads() for role in WORKERS for service in ServiceClass}
        self._roles: dict[str, Role] = {}  # of workers that are there
        self._num_workers: Counter[Role] = Counter()
        self._block_size = block_size
        self._node: dict[str, str] = {}  # of workers that are there
        self._rooms: dict[str, Rooms] = {}  # of the decode workers of a node
        self._prefill_at: dict[
            str, dict[str, None]
        ] = {}  # node -> its prefill workers, in the order in which they came
        self._beginnings = Beginnings()
        self._late: dict[
            str, tuple[int, int]
        ] = {}  # decode worker -> chats that it decodes; of them, those that are late

    # --- Who is there, and what they have

    def met(self, worker: Member) -> None:
        if worker.name not in self._roles:
            self._num_workers[worker.role] += 1
        if self._node.get(worker.name, worker.node) != worker.node:  # another life of it, elsewhere
            self._leaves(worker.name)
        self._roles[worker.name], self._node[worker.name] = worker.role, worker.node
        if worker.role is Role.PREFILL:
            self._prefill_at.setdefault(worker.node, {})[worker.name] = None
        self._reckon(worker.name)

    def lost(self, member: str) -> None:
        self._backlogs.pop(member, None)
        self._late.pop(member, None)
        role = self._roles.pop(member, None)
        if role is not None:
            self._num_workers[role] -= 1
            for service in ServiceClass:
                self._loads[role, service].remove(member)
            self._leaves(member)
            del self._node[member]

    def _leaves(self, worker: str) -> None:
        """Its node."""
        self._rooms_of(worker).forget(worker)
        self._prefill_at.get(self._node[worker], {}).pop(worker, None)

    def renewed(self, member: str) -> None:
        """Another life of it: what the one before had is gone."""
        self._backlogs.pop(member, None)
        self._late.pop(member, None)
        self._reckon(member)

    def progressed(self, worker: str, backlog: Backlog, free_pairs: int) -> None:
        self._backlogs[worker] = backlog
        self._reckon(worker)
        self.has_room(worker, free_pairs)

    def has_room(self, worker: str, free_pairs: int) -> None:
        if self._roles.get(worker) is Role.DECODE:
            self._rooms_of(worker).tell(worker, free_pairs)

    def reported(self, worker: str, report: Report) -> None:
        if self._roles.get(worker) is Role.DECODE:
            self._rooms_of(worker).report(worker, report)
            self._late[worker] = report.num_rt, report.num_late

    def kept(self, request: Request, node: str, pools: Pools) -> None:
        """The KV of its prompt has come there, where a pool keeps it."""
        if self._tells_apart(pools) and node in pools:
            self._beginnings.came(request, node)

    def pool_lost(self, node: str) -> None:
        self._beginnings.forget(node)

    def came(self, member: str) -> None:
        """A request, to a member."""
        self._num_at[member] += 1
        self._reckon(member)

    def left(self, member: str) -> None:
        self._num_at[member] -= 1
        self._reckon(member)

    # --- How many are needed (demand.py)

    def num_workers(self, role: Role) -> int:
        return self._num_workers[role]

    def num_busy(self, role: Role) -> int:
        """Of its workers, those that have a request."""
        return sum(1 for name, one in self._roles.items() if one is role and self._num_at[name])

    def decodes_only_elsewhere(self, node: str) -> bool:
        """There are decode workers, but not on this node."""
        nodes = {self._node[name] for name, role in self._roles.items() if role is Role.DECODE}
        return bool(nodes) and node not in nodes

    @property
    def memory(self) -> int:
        """Tokens that all decode workers hold; 0: not known."""
        return self._kv_tokens * self._num_workers[Role.DECODE]

    @property
    def late(self) -> tuple[int, int]:
        """Chats that decode, as their workers told last; of them, those whose next token is late."""
        return sum(num for num, _ in self._late.values()), sum(late for _, late in self._late.values())

    def least_wait_s(self, role: Role, service: ServiceClass) -> float:
        """For other prompts, at the worker where that is least."""
        worker = self._loads[role, service].least()
        return 0.0 if worker is None else self._wait_s(worker, service)

    # --- Where to

    def ahead_of(self, request: Request, pools: Pools) -> Ahead:
        """What it would find, if it were placed now."""
        worker, memory = self.worker_for(request, pools), self.memory
        if worker is None:
            return Ahead(memory=memory)
        num_workers = self._num_workers[self._roles[worker]]
        prompt_s = self._prompt_s(worker, request, self._known(request, pools))
        return Ahead(self._wait_s(worker, request.service), prompt_s, self._token_s(worker), memory, num_workers)

    def runs_prompts(self, pools: Pools) -> bool:
        """Somebody. Without prefill workers only those without a pool do."""
        return bool(self._num_workers[Role.PREFILL] or (self._num_workers[Role.DECODE] and not pools))

    def worker_for(self, request: Request, pools: Pools) -> str | None:
        if not self.runs_prompts(pools):
            return None
        prefill, decode = (self._loads[role, request.service].least() for role in WORKERS)
        if prefill is None:
            return decode
        if known := self._known(request, pools):
            prefill = self._first_through(prefill, request, known)
        helps = decode is not None and self._node[decode] in pools and self._can_help(decode, prefill, request)
        return decode if helps else prefill

    def _first_through(self, least: str, request: Request, known: Mapping[str, int]) -> str:
        """The least loaded prefill worker, or one of those that have less of this prompt to run."""
        others = [worker for node in known if self._decodes_at(node) for worker in self._prefill_at.get(node, ())]

        def first_token_s(worker: str) -> float:
            return self._wait_s(worker, request.service) + self._prompt_s(worker, request, known)

        return min((least, *others), key=first_token_s)  # of equals the least loaded

    def placed(self, worker: str, request: Request, pools: Pools) -> str:
        """Its backlog is longer by that. Which decode worker its prompt goes on to, where there is a choice."""
        if (backlog := self._backlogs.get(worker)) is not None:
            more_s = self._prompt_s(worker, request, self._known(request, pools))
            rt_s = backlog.rt_prompts_s + (more_s if request.service is ServiceClass.RT else 0.0)
            self._backlogs[worker] = replace(backlog, prompts_s=backlog.prompts_s + more_s, rt_prompts_s=rt_s)
        if self._roles.get(worker) is not Role.PREFILL:
            return ""
        return self._rooms_for(worker, request).name_one(request.tokens, self._most(request))

    def _rooms_for(self, worker: str, request: Request) -> Rooms:
        """Of the node that its prompt is to go on to."""
        own = self._rooms_of(worker)
        if own.most_free >= own.pairs(len(request.tokens)):
            return own
        return max(self._rooms.values(), key=lambda rooms: rooms.most_free)  # of equals the first that came

    def _rooms_of(self, worker: str) -> Rooms:
        """Of the decode workers of its node."""
        node = self._node[worker]
        if node not in self._rooms:
            self._rooms[node] = Rooms(self._block_size, self._policy.grouping is Grouping.ALIGNED)
        return self._rooms[node]

    def _can_help(self, decode: str, prefill: str, request: Request) -> bool:
        if not self._policy.helps or request.service is not ServiceClass.RT:
            return False
        wait_s = self._wait_s(prefill, request.service)
        if wait_s <= PILED_TTFT * request.slo.ttft_s or not self._rooms_of(decode).has_room(
            decode, self._most(request)
        ):
            return False
        return self._wait_s(decode, request.service) < _LESS * wait_s

    def _wait_s(self, worker: str, service: ServiceClass) -> float:
        return self._before(self._backlogs.get(worker, Backlog()), service)

    def _before(self, backlog: Backlog, service: ServiceClass) -> float:
        is_first = self._policy.ordering.puts_first(service)
        return backlog.rt_prompts_s if is_first else backlog.prompts_s

    def _known(self, request: Request, pools: Pools) -> Mapping[str, int]:
        """Node -> of its first tokens, so many as the pool there has; where there is one pool, it has them for all."""
        return self._beginnings.tokens_at(request) if self._tells_apart(pools) else _NOWHERE

    def _tells_apart(self, pools: Pools) -> bool:
        """Nodes, by what they know of a prompt."""
        return len(pools) > 1 and self._policy.reuse

    def _decodes_at(self, node: str) -> bool:
        return node in self._rooms and self._rooms[node].is_any

    def _prompt_s(self, worker: str, request: Request, known: Mapping[str, int]) -> float:
        """Its prompt alone, but for what the pool of its node has of it."""
        return (len(request.tokens) - known.get(self._node[worker], 0)) * self._token_s(worker)

    def _token_s(self, worker: str) -> float:
        """A token of a prompt there."""
        return self._backlogs.get(worker, Backlog()).prompt_token_s

    def _most(self, request: Request) -> int:
        return len(request.prompt) + expected(request, self._policy).upper

    def _reckon(self, name: str) -> None:
        """What is before a worker has changed, or it has come."""
        role = self._roles.get(name)
        if role is None:
            return
        backlog, num_at = self._backlogs.get(name, Backlog()), self._num_at[name]
        for service in ServiceClass:
            self._loads[role, service].put((self._before(backlog, service), num_at, name))
