"""Choose the worker that runs a prompt, and the decode worker that the request should go on to.

A prompt goes to the worker with the earliest predicted first token, behind the prompts that run before it there: a
prefill worker, or a decode worker where these run the prompts (colocated). Where promises decide the order, only
real-time prompts run before a real-time one. Workers do not compute again what their device, or the pool of their node,
has of a prompt's beginning (beginnings.py): it gets the prompt, unless another is through earlier all the same.

From a prefill worker the request goes on to a decode worker of the same node if one has room, else to the node whose
decode worker has most room: the KV travels there by the collective transport, and the request stays there.

    prompts pile up    decode workers that have room take prompts of chats
    decodes pile up    decode workers have no room left, and take no prompts

Decode workers take no best-effort prompts: they would keep requests waiting that are in the pool already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from alignedserve.core import KEEPS_ALL, WORKERS, Request, Retention, Role, ServiceClass
from alignedserve.policies.facts import WorkerChoice
from alignedserve.protocol.messages import Backlog, Member, Report
from alignedserve.router.placing.admission import WorkAhead
from alignedserve.router.placing.beginnings import Beginnings
from alignedserve.router.placing.holdings import Holdings
from alignedserve.router.placing.loads import Loads
from alignedserve.router.placing.own import own_placement
from alignedserve.router.placing.rooms import Rooms
from alignedserve.scheduling.lengths import expected
from alignedserve.scheduling.policy import Grouping, Policy

PILED_TTFT = 0.5  # prompts have piled up when a chat would wait for this share of its ttft
Pools: TypeAlias = Mapping[str, str]  # node -> name of its pool
_MORE_HELD = 4  # tokens more that a worker may hold than another, for each that it need not compute


@dataclass(frozen=True, slots=True)
class PromptWork:
    """The work of a worker on a prompt: tokens that it computes, and the time to copy what the pool has."""

    tokens: int
    copy_s: float = 0.0

    def seconds(self, token_s: float) -> float:
        return self.copy_s + self.tokens * token_s


@dataclass(frozen=True, slots=True)
class Known:
    """How many of a prompt's first tokens are at each place, as far as the router knows."""

    at: Mapping[str, int] = field(default_factory=dict)  # worker or pool -> tokens
    pools: Pools = field(default_factory=dict)

    def work(self, tokens: int, worker: str, node: str, backlog: Backlog) -> PromptWork:
        """Return the work on a prompt of so many tokens. The worker copies what only the pool has where that takes less
        time than computing it, by its own cost model."""
        here, there = self.at.get(worker, 0), self.at.get(self.pools.get(node, ""), 0)
        if there <= here:
            return PromptWork(tokens - here)
        copy_s = backlog.copying.seconds(there - here)
        is_computed = 0 < (there - here) * backlog.prompt_token_s < copy_s
        return PromptWork(tokens - here) if is_computed else PromptWork(tokens - there, copy_s)

    @property
    def nodes(self) -> list[str]:
        """Return the nodes whose pools have something of it."""
        return [node for node, pool in self.pools.items() if pool in self.at]


_NOTHING = Known()
_NOTHING_TOLD = Backlog()


class Placement:
    def __init__(
        self,
        policy: Policy,
        block_size: int,
        kv_tokens: int,
        prompts_on: Role = Role.PREFILL,
        retention: Retention = KEEPS_ALL,
    ) -> None:
        """`kv_tokens` is the number of tokens that a decode worker's device holds; 0 means not known. `prompts_on` is
        the role of the workers that run the prompts."""
        self._retention = retention
        self._policy, self._kv_tokens, self._prompts_on = policy, kv_tokens, prompts_on
        self._own = own_placement(policy)  # names the worker in place of what follows
        self._num_at: Counter[str] = Counter()  # member -> number of its requests
        self._holdings: dict[str, Holdings] = {}  # member -> memory of its requests
        self._backlogs: dict[str, Backlog] = {}  # worker -> its prompts, including those sent since it told
        self._told_at: dict[str, float] = {}  # worker -> when this was its backlog
        self._loads = {(role, service): Loads() for role in WORKERS for service in ServiceClass}
        self._roles: dict[str, Role] = {}  # worker -> role
        self._num_workers: Counter[Role] = Counter()
        self._block_size = block_size
        self._node: dict[str, str] = {}  # worker -> node
        self._rooms: dict[str, Rooms] = {}  # node -> the room of its decode workers
        self._run_prompts_at: dict[str, dict[str, None]] = {}  # node -> its workers that do, in the order of arrival
        self._beginnings = Beginnings()
        self._late: dict[str, tuple[int, int]] = {}  # decode worker -> (chats that it decodes, late ones among them)

    # --- Workers, and the work that they have

    def met(self, worker: Member) -> None:
        if worker.name not in self._roles:
            self._num_workers[worker.role] += 1
        if self._node.get(worker.name, worker.node) != worker.node:  # it has started again on another node
            self._leave_node(worker.name)
        self._roles[worker.name], self._node[worker.name] = worker.role, worker.node
        if worker.role is self._prompts_on:
            self._run_prompts_at.setdefault(worker.node, {})[worker.name] = None
        self._update_load(worker.name)

    def lost(self, member: str) -> None:
        self._backlogs.pop(member, None)
        self._late.pop(member, None)
        self._beginnings.forget(member)
        self.withdraw(member)

    def withdraw(self, worker: str) -> None:
        """Place nothing on the worker until it is met again."""
        role = self._roles.pop(worker, None)
        if role is not None:
            self._num_workers[role] -= 1
            for service in ServiceClass:
                self._loads[role, service].remove(worker)
            self._leave_node(worker)
            del self._node[worker]

    def _leave_node(self, worker: str) -> None:
        self._rooms_of(worker).forget(worker)
        self._run_prompts_at.get(self._node[worker], {}).pop(worker, None)

    def renewed(self, member: str) -> None:
        """Note that the member has started again: what its earlier incarnation had is gone."""
        self._backlogs.pop(member, None)
        self._late.pop(member, None)
        self._beginnings.forget(member)
        self._update_load(member)

    def progressed(self, worker: str, backlog: Backlog, free_pairs: int, now: float) -> None:
        self._backlogs[worker], self._told_at[worker] = backlog, now
        self._update_load(worker)
        self.note_room(worker, free_pairs)

    def note_room(self, worker: str, free_pairs: int) -> None:
        if self._roles.get(worker) is Role.DECODE:
            self._rooms_of(worker).tell(worker, free_pairs)

    def reported(self, worker: str, report: Report) -> None:
        if self._roles.get(worker) is Role.DECODE:
            self._rooms_of(worker).report(worker, report)
            self._late[worker] = report.num_rt, report.num_late

    def kept(self, request: Request, node: str, pools: Pools) -> None:
        """Remember that the KV of the prompt is on this node, where the pool keeps it."""
        if self._policy.reuse and node in pools:
            self._beginnings.came(request, pools[node])

    def pool_lost(self, pool: str) -> None:
        self._beginnings.forget(pool)

    def came(self, member: str, request: Request) -> None:
        """Note that a request has come to the member."""
        self._num_at[member] += 1
        self._holdings_of(member).put(request)
        self._update_load(member)

    def left(self, member: str, request: Request) -> None:
        self._num_at[member] -= 1
        self._holdings_of(member).remove(request.id)
        self._update_load(member)

    def expects(self, member: str, request: Request) -> None:
        """Count a request of the member anew: its output is expected to be of another length."""
        self._holdings_of(member).put(request)
        self._update_load(member)

    def _holdings_of(self, member: str) -> Holdings:
        if member not in self._holdings:
            self._holdings[member] = Holdings(self._policy, self._retention)
        return self._holdings[member]

    # --- The load (demand.py)

    def num_workers(self, role: Role) -> int:
        return self._num_workers[role]

    def num_at(self, member: str) -> int:
        return self._num_at[member]

    @property
    def emptiest(self) -> str | None:
        """Return the decode worker that has the fewest requests."""
        workers = [name for name, role in self._roles.items() if role is Role.DECODE]
        return min(workers, key=lambda name: self._num_at[name], default=None)

    def num_busy(self, role: Role) -> int:
        """Count the workers of the role that have a request."""
        return sum(1 for name, its_role in self._roles.items() if its_role is role and self._num_at[name])

    def decodes_only_elsewhere(self, node: str) -> bool:
        """Return whether there are decode workers, but none on this node."""
        nodes = {self._node[name] for name, role in self._roles.items() if role is Role.DECODE}
        return bool(nodes) and node not in nodes

    @property
    def memory(self) -> int:
        """Return the tokens that all decode workers hold; 0 means not known."""
        return self._kv_tokens * self._num_workers[Role.DECODE]

    @property
    def late(self) -> tuple[int, int]:
        """Return how many chats decode, as workers told last, and how many of them are late with their next token."""
        return sum(num for num, _ in self._late.values()), sum(late for _, late in self._late.values())

    def least_wait_s(self, role: Role, service: ServiceClass, now: float) -> float:
        """Return the wait for other prompts at the worker where it is shortest."""
        worker = self._loads[role, service].least(now)
        return 0.0 if worker is None else self._wait_s(worker, service, now)

    # --- Placement

    def ahead_of(self, request: Request, pools: Pools, now: float) -> WorkAhead:
        """Return the work that the request would find before it, if it were placed now."""
        worker, memory = self.worker_for(request, pools, now), self.memory
        if worker is None:
            return WorkAhead(memory=memory)
        num_workers, known = self._num_workers[self._roles[worker]], self._known(request, pools)
        prompt_s, loaded_s = self._prompt_s(worker, request, known), self._loaded_s(worker, request, known)
        wait_s = self._wait_s(worker, request.service, now) + max(0.0, loaded_s - prompt_s)  # others slow it down too
        lacks = self._lacks(worker, request) if self._roles[worker] is Role.DECODE else None
        free, num_decoding = self._free_tokens(worker), max(1, self._num_workers[Role.DECODE])
        return WorkAhead(wait_s, prompt_s, self._token_s(worker), memory, num_workers, lacks, free, num_decoding)

    def _free_tokens(self, worker: str) -> float | None:
        """Return how many tokens of memory chats find on a decode worker, or where a prompt goes on to from a prefill
        worker: on the decode worker that has most; None where that is not known."""
        if self._roles[worker] is Role.DECODE:
            pairs = self._rooms_of(worker).for_chats(worker)
        else:
            told = (rooms.most_for_chats for rooms in self._rooms.values())
            pairs = max((pairs for pairs in told if pairs is not None), default=None)
        return None if pairs is None else pairs * self._block_size

    def _lacks(self, worker: str, request: Request) -> int | None:
        """Return the tokens of memory that the worker would lack for its real-time requests and this one."""
        if not self._kv_tokens:
            return None
        return max(0, self._holdings_of(worker).rt_with_one_more(request) - self._kv_tokens)

    @property
    def runs_prompts(self) -> bool:
        """Return whether there is a worker that runs prompts."""
        return self._num_workers[self._prompts_on] > 0

    def worker_for(self, request: Request, pools: Pools, now: float) -> str | None:
        """Return the worker that a policy of one's own names for the prompt, or the usual one."""
        own = None
        if self._own is not None and self.runs_prompts:
            own = self._own.worker(request, self._choices(request, self._known(request, pools), now))
        return self._usual_worker(request, pools, now) if own is None else own

    def _choices(self, request: Request, known: Known, now: float) -> tuple[WorkerChoice, ...]:
        """Return the workers that a policy of one's own may name."""
        return tuple(
            WorkerChoice(
                name,
                self._wait_s(name, request.service, now),
                self._prompt_s(name, request, known),
                self._num_at[name],
                self._holdings_of(name).tokens,
                len(request.tokens) - self._work(name, request, known).tokens,
            )
            for name, role in self._roles.items()
            if role is self._prompts_on
        )

    def _usual_worker(self, request: Request, pools: Pools, now: float) -> str | None:
        first = self._loads[self._prompts_on, request.service].least(now)
        if first is not None and self._num_workers[self._prompts_on] > 1:
            first = self._first_through(first, request, self._known(request, pools), now)
        if first is None or self._prompts_on is Role.DECODE:
            return first
        prefill, decode = first, self._loads[Role.DECODE, request.service].least(now)
        helps = (
            decode is not None
            and self._node[decode] in pools
            and self._can_help(decode, prefill, request, self._known(request, pools), now)
        )
        return decode if helps else prefill

    def _first_through(self, least: str, request: Request, known: Known, now: float) -> str:
        """Return the worker with the earliest first token: the least loaded, or one near its prefix.

        A beginning that all requests share would draw all of them to one worker, where they would decode slowly: so a
        worker that holds much more than others does not count."""
        nodes = [node for node in known.nodes if self._decodes_at(node)] if len(self._run_prompts_at) > 1 else []
        others = [worker for node in nodes for worker in self._run_prompts_at.get(node, ())]
        others += [worker for worker in known.at if self._roles.get(worker) is self._prompts_on]
        least_held = self._held(least, request.service)

        def is_balanced(worker: str) -> bool:
            more = self._held(worker, request.service) - least_held
            return more <= _MORE_HELD * self._saved(worker, request, known)

        def first_token_s(worker: str) -> float:
            return self._wait_s(worker, request.service, now) + self._prompt_s(worker, request, known)

        return min((least, *filter(is_balanced, others)), key=first_token_s)  # among equals the least loaded

    def placed(self, worker: str, request: Request, pools: Pools, now: float) -> str:
        """Add the prompt to the worker's backlog, and return the decode worker that it should go on to, if any."""
        if (backlog := self._backlogs.get(worker)) is not None:
            more_s = self._loaded_s(worker, request, self._known(request, pools))
            passed_s, self._told_at[worker] = now - self._told_at[worker], now
            all_s, rt_s = max(0.0, backlog.prompts_s - passed_s), max(0.0, backlog.rt_prompts_s - passed_s)
            rt_s += more_s if request.service is ServiceClass.RT else 0.0
            self._backlogs[worker] = replace(backlog, prompts_s=all_s + more_s, rt_prompts_s=rt_s)
        if self._policy.reuse:
            self._beginnings.came(request, worker)
        if self._roles.get(worker) is not Role.PREFILL:
            return ""
        gives = request.service is ServiceClass.BE and self._policy.precedence.may_displace(is_rt=True)
        return self._rooms_for(worker, request).choose(request.tokens, self._most(request), gives)

    def _rooms_for(self, worker: str, request: Request) -> Rooms:
        """Return the room of the node that the request should go on to."""
        own = self._rooms_of(worker)
        if own.most_free >= own.pairs(len(request.tokens)):
            return own
        return max(self._rooms.values(), key=lambda rooms: rooms.most_free)  # among equals the node that came first

    def _rooms_of(self, worker: str) -> Rooms:
        """Return the room of the decode workers of this worker's node."""
        node = self._node[worker]
        if node not in self._rooms:
            by_band = self._policy.grouping is Grouping.ALIGNED
            self._rooms[node] = Rooms(self._block_size, by_band, self._retention)
        return self._rooms[node]

    def _can_help(self, decode: str, prefill: str, request: Request, known: Known, now: float) -> bool:
        if not self._policy.helps or request.service is not ServiceClass.RT:
            return False
        first_s = self._first_token_s(prefill, request, known, now)
        if first_s <= PILED_TTFT * request.slo.ttft_s or not self._rooms_of(decode).has_room(
            decode, self._most(request)
        ):
            return False
        return self._first_token_s(decode, request, known, now) < first_s

    def _first_token_s(self, worker: str, request: Request, known: Known, now: float) -> float:
        """Return the seconds until the first token of a request that the worker would get now."""
        return self._wait_s(worker, request.service, now) + self._loaded_s(worker, request, known)

    def _wait_s(self, worker: str, service: ServiceClass, now: float) -> float:
        return max(0.0, self._through_at(worker, service) - now)

    def _through_at(self, worker: str, service: ServiceClass) -> float:
        """Return when the worker will be through with the prompts that go before a new one of this class."""
        return self._told_at.get(worker, 0.0) + self._before(self._backlog(worker), service)

    def _before(self, backlog: Backlog, service: ServiceClass) -> float:
        is_first = self._policy.ordering.puts_first(service)
        return backlog.rt_prompts_s if is_first else backlog.prompts_s

    def _known(self, request: Request, pools: Pools) -> Known:
        """Return how many of the prompt's first tokens devices and pools have."""
        return Known(self._beginnings.tokens_at(request), pools) if self._policy.reuse else _NOTHING

    def _decodes_at(self, node: str) -> bool:
        return node in self._rooms and self._rooms[node].is_any

    def _work(self, worker: str, request: Request, known: Known) -> PromptWork:
        return known.work(len(request.tokens), worker, self._node[worker], self._backlog(worker))

    def _saved(self, worker: str, request: Request, known: Known) -> float:
        """Return the tokens that the worker need not compute, less those that it could in the time to copy them."""
        work, token_s = self._work(worker, request, known), self._token_s(worker)
        return len(request.tokens) - work.tokens - (work.copy_s / token_s if token_s else 0.0)

    def _prompt_s(self, worker: str, request: Request, known: Known) -> float:
        """Return the time of the prompt alone: to compute what neither device nor pool has of it, and to copy."""
        return self._work(worker, request, known).seconds(self._token_s(worker))

    def _loaded_s(self, worker: str, request: Request, known: Known) -> float:
        """Return the time of the prompt behind and beside what the worker has."""
        backlog = self._backlog(worker)
        is_first = self._policy.ordering.puts_first(request.service)
        token_s = backlog.rt_loaded_token_s if is_first else backlog.loaded_token_s
        return self._work(worker, request, known).seconds(token_s)

    def _token_s(self, worker: str) -> float:
        """Return the time of a prompt token on this worker."""
        return self._backlog(worker).prompt_token_s

    def _backlog(self, worker: str) -> Backlog:
        return self._backlogs.get(worker, _NOTHING_TOLD)

    def _most(self, request: Request) -> int:
        return len(request.prompt) + expected(request, self._policy).upper

    def _update_load(self, name: str) -> None:
        """Order the worker anew: it has come, or its work has changed."""
        role = self._roles.get(name)
        if role is None:
            return
        for service in ServiceClass:
            self._loads[role, service].put(name, self._through_at(name, service), self._held(name, service))

    def _held(self, worker: str, service: ServiceClass) -> int:
        """Return the tokens that requests of the worker will hold: those that a new one of this class waits for."""
        holdings = self._holdings_of(worker)
        return holdings.rt_tokens if self._policy.ordering.puts_first(service) else holdings.tokens
