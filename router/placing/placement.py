"""Choose the worker that runs a prompt, and the decode worker that the request should go on to.

A prompt goes to the worker with the earliest predicted first token, behind the prompts that run there before: a prefill
worker, or a decode worker where these run the prompts (colocated). Where promises decide the order, only real-time
prompts run before a real-time prompt. A worker does not compute a beginning of the prompt that its device, or its
node's pool, has (held.py): such a worker gets the prompt, unless another finishes earlier all the same.

From a prefill worker the request goes on to a decode worker of the same node with room, else to the node of the decode
worker with most room: the KV travels there by the collective transport, and the request stays there.

Prefill workers decode, too, unless the policy keeps them apart: they *lend* memory and time. Then a request goes on
only where that is worth it, and else stays where the KV is. So roles follow the load:

    prompts pile up    decode workers take prompts: of chats where they have room, of documents where they have no chats
    decodes pile up    requests stay on the workers of their prompts; requests that had to leave come back to any
    no prefill worker  decode workers take all prompts
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp, inf
from typing import TypeAlias

from alignedserve.core import KEEPS_ALL, WORKERS, Request, Retention, Role, ServiceClass
from alignedserve.protocol.messages import SEEN_S, Backlog, Member, Report
from alignedserve.router.placing.admission import WorkAhead
from alignedserve.router.placing.answers import NO_SHORTAGE, AnswersAhead, Shortage
from alignedserve.router.placing.held import Beginnings, HeldMemory, Holdings, pieces_of
from alignedserve.router.placing.ranking import Loads, Rooms
from alignedserve.scheduling.lengths import mean_and_upper
from alignedserve.scheduling.policy import Policy

PILED_BE_S = 10.0  # and best-effort prompts, when a decode worker with chats would finish them sooner by this
HELPED_S = 1.0  # in which a decode worker that got a prompt will get another
MOST_HELP, RECENT_S = 0.1, 5.0  # from this share of recent time with prompts on, a decode worker gets no requests
QUEUE_SHARE_OF_TTFT = 0.5  # prompts have piled up when a chat would wait for this share of the ttft
# The same where prefill workers decode, and none hands a request on to the decode worker just now.
QUEUE_SHARE_OF_TTFT_WHEN_PREFILL_DECODES = 0.25
Pools: TypeAlias = Mapping[str, str]  # node -> name of its pool
_MORE_HELD = 4  # tokens more that a worker may hold than another, for each token that it need not compute


@dataclass(slots=True)  # made for every request, and a frozen one takes three times as long
class PromptWork:
    """The work of a worker on a prompt: tokens to compute, and the time to copy what the pool has."""

    tokens: int
    copy_s: float = 0.0

    def seconds(self, token_s: float) -> float:
        return self.copy_s + self.tokens * token_s


@dataclass(slots=True)
class Known:
    """How many of a prompt's first tokens the router knows to be at each place."""

    at: Mapping[str, int]  # worker or pool -> tokens
    pools: Pools

    def work(self, tokens: int, worker: str, node: str, backlog: Backlog) -> PromptWork:
        """Return the work on a prompt of this length. The worker copies what only the pool has where that takes less
        time than computing it, by its own cost model."""
        here, there = self.at.get(worker, 0), self.at.get(self.pools.get(node, ""), 0)
        if there <= here:
            return PromptWork(tokens - here)
        copy_s = backlog.copying.seconds(there - here)
        is_computed = 0 < (there - here) * backlog.prompt_token_s < copy_s
        return PromptWork(tokens - here) if is_computed else PromptWork(tokens - there, copy_s)

    @property
    def nodes(self) -> list[str]:
        """Return the nodes with a pool that has some of the tokens."""
        return [node for node, pool in self.pools.items() if pool in self.at]


@dataclass(slots=True)
class _Prompts:
    """The prompts of a worker: those of its last message, and those sent there since."""

    told: Backlog = field(default_factory=Backlog)
    all_s: float = 0.0  # to run all of them, from `at` on
    rt_s: float = 0.0  # to run those of real-time requests
    at: float = 0.0

    def before(self, is_first: bool) -> float:
        """Return the time of the prompts before a new prompt. `is_first`: only real-time prompts run before."""
        return self.rt_s if is_first else self.all_s

    def loaded_token_s(self, is_first: bool, now: float) -> float:
        """Return the time of one more prompt token behind and beside what is there.

        A worker that has nothing to run tells nothing: from then on what it saw counts less and less, as there."""
        told = self.told
        seen_s = told.rt_loaded_token_s if is_first else told.loaded_token_s
        idle_s = now - self.at - self.before(is_first)
        if idle_s <= 0.0 or seen_s == told.prompt_token_s:
            return seen_s
        return told.prompt_token_s + (seen_s - told.prompt_token_s) * exp(-idle_s / SEEN_S)

    def pass_time(self, now: float) -> None:
        all_token_s, rt_token_s = self.loaded_token_s(False, now), self.loaded_token_s(True, now)
        if (all_token_s, rt_token_s) != (self.told.loaded_token_s, self.told.rt_loaded_token_s):
            self.told = replace(self.told, loaded_token_s=all_token_s, rt_loaded_token_s=rt_token_s)
        passed_s, self.at = now - self.at, now
        self.all_s, self.rt_s = max(0.0, self.all_s - passed_s), max(0.0, self.rt_s - passed_s)


_NO_PROMPTS = _Prompts()


@dataclass(slots=True)
class _Help:
    """The prompts that a decode worker ran lately."""

    at: float = -inf  # when the last came
    sum_s: float = 0.0  # time of these prompts, at that moment: older prompts count less and less

    def add(self, seconds: float, now: float) -> None:
        self.at, self.sum_s = now, self.share(now) * RECENT_S + seconds

    def share(self, now: float) -> float:
        """Return the share of the recent time that these prompts took."""
        return self.sum_s * exp((self.at - now) / RECENT_S) / RECENT_S


class Placement:
    def __init__(
        self,
        policy: Policy,
        block_size: int,
        kv_tokens: int,
        prompts_on: Role = Role.PREFILL,
        retention: Retention = KEEPS_ALL,
        lends: bool = False,
    ) -> None:
        """`kv_tokens` is the number of tokens that a decode worker's device holds; 0 means not known. `prompts_on` is
        the kind of the workers that prompts go to. `lends` says that prefill workers decode, too."""
        self._retention = retention
        self._policy, self._kv_tokens, self._prompts_on, self._lends = policy, kv_tokens, prompts_on, lends
        self._num_at: Counter[str] = Counter()  # member -> number of requests
        self._holdings: dict[str, Holdings] = {}  # member -> memory of requests
        self._prompts: dict[str, _Prompts] = {}  # worker -> prompts
        self._loads = {role: {service: Loads() for service in ServiceClass} for role in WORKERS}
        self._roles: dict[str, Role] = {}  # worker -> kind: a prefill worker that decodes too is of PREFILL
        self._lent: dict[str, int | None] = {}  # such a worker -> blocks that chats find there; None: not told
        self._help: defaultdict[str, _Help] = defaultdict(_Help)  # decode worker -> prompts that it got
        self._coming: dict[str, str] = {}  # request that is to leave the prompt's worker -> decode worker
        self._num_workers: Counter[Role] = Counter()
        self._block_size = block_size
        self._node: dict[str, str] = {}  # worker -> node
        self._rooms: dict[str, Rooms] = {}  # node -> room of the decode workers
        self._run_prompts_at: dict[str, dict[str, None]] = {}  # node -> workers that do, in the order of arrival
        self._beginnings = Beginnings()
        self._last: tuple[Request | None, tuple[int, ...]] = (None, ())  # the last prompt, and the pieces
        self._pieces: dict[str, tuple[int, ...]] = {}  # request on a worker -> pieces of the prompt
        self._pools: dict[str, None] = {}  # that have had requests
        self._answers = AnswersAhead(policy.expected_output, retention, policy.grows)
        self._late: dict[str, tuple[int, int]] = {}  # decode worker -> (chats that decode, late chats among them)

    # --- Workers, and the work that they have

    def add_worker(self, worker: Member) -> None:
        if worker.name not in self._roles:
            self._num_workers[worker.kind] += 1
        if self._node.get(worker.name, worker.node) != worker.node:  # it has started again on another node
            self._leave_node(worker.name)
        self._roles[worker.name], self._node[worker.name] = worker.kind, worker.node
        if worker.lends:
            self._lent.setdefault(worker.name, None)
        if worker.kind is self._prompts_on:
            self._run_prompts_at.setdefault(worker.node, {})[worker.name] = None
        self._update_load(worker.name)

    def remove_worker(self, member: str) -> None:
        self._prompts.pop(member, None)
        self._late.pop(member, None)
        self._help.pop(member, None)
        self._beginnings.forget(member)
        self.withdraw(member)

    def withdraw(self, worker: str) -> None:
        """Place nothing on the worker until it is met again."""
        role = self._roles.pop(worker, None)
        self._lent.pop(worker, None)
        if role is not None:
            self._num_workers[role] -= 1
            for loads in self._loads[role].values():
                loads.remove(worker)
            self._leave_node(worker)
            del self._node[worker]

    def _leave_node(self, worker: str) -> None:
        self._rooms_of(worker).forget(worker)
        self._run_prompts_at.get(self._node[worker], {}).pop(worker, None)

    def restart_worker(self, member: str) -> None:
        """Note that the member has started again: what its earlier incarnation had is gone."""
        self._prompts.pop(member, None)
        self._late.pop(member, None)
        self._beginnings.forget(member)
        self._update_load(member)

    def progressed(self, worker: str, backlog: Backlog, free_blocks: int, now: float) -> None:
        self._prompts[worker] = _Prompts(backlog, backlog.prompts_s, backlog.rt_prompts_s, now)
        self._update_load(worker)
        self.note_room(worker, free_blocks)

    def note_room(self, worker: str, free_blocks: int) -> None:
        if worker in self._lent:
            self._lent[worker] = free_blocks
        elif self._roles.get(worker) is Role.DECODE:
            self._rooms_of(worker).tell(worker, free_blocks)

    def reported(self, worker: str, report: Report, now: float) -> None:
        if worker in self._lent:
            self._lent[worker] = report.free_blocks + report.given_blocks
        elif self._roles.get(worker) is Role.DECODE:
            self._rooms_of(worker).report(worker, report)
        if self._decodes(worker):
            self._answers.reported(worker, report, now)
            self._late[worker] = report.num_rt, report.num_late

    def _decodes(self, worker: str) -> bool:
        return worker in self._lent or self._roles.get(worker) is Role.DECODE

    def note_prefix(self, request: Request, node: str, pools: Pools) -> None:
        """Remember that the KV of the prompt is on this node, where the pool keeps it."""
        if self._policy.reuse and node in pools:
            pieces = self._pieces.pop(request.id, None)
            self._beginnings.came(self._pieces_of(request) if pieces is None else pieces, pools[node])

    def pool_lost(self, pool: str) -> None:
        self._beginnings.forget(pool)

    def add_request(
        self,
        member: str,
        request: Request,
        now: float,
        held: HeldMemory | None = None,
        tokens: float | None = None,
        has_prompt: bool = False,
    ) -> None:
        """Note that a request has come to the member, and whether the prompt is still to run there. `held` is the
        memory that it will hold, and `tokens` its output so far, if they are known."""
        role = self._roles.get(member)
        if role is None:
            self._pools[member] = None
        self._answers.put(member, request, role is Role.DECODE and not has_prompt, now, tokens)
        self._num_at[member] += 1
        self._holdings_of(member).put(request, held)
        self._update_load(member)

    def moved(self, before: str, to: str, request: Request, now: float) -> None:
        """Note that a request has left one member for another."""
        tokens = self._answers.take(before, request.id, now)
        self.add_request(to, request, now, self.remove_request(before, request), tokens)

    def asked(self, request: Request, now: float) -> None:
        """Note that a new request has come, admitted or not."""
        self._answers.asked(request, now)

    def ended(self, request: Request, length: int) -> None:
        """Note the length of the output of a chat that has ended."""
        self._answers.ended(request, length)

    def remove_request(self, member: str, request: Request) -> HeldMemory | None:
        """Note that a request has left the member, and return the memory that was expected."""
        self._answers.take(member, request.id, 0.0)
        self._num_at[member] -= 1
        self._pieces.pop(request.id, None)
        self._coming.pop(request.id, None)
        self._update_load(member)
        return self._holdings_of(member).remove(request.id)

    def _holdings_of(self, member: str) -> Holdings:
        if (holdings := self._holdings.get(member)) is None:
            self._holdings[member] = holdings = Holdings(self._policy, self._retention)
        return holdings

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

    def num_with_prompts(self, now: float) -> int:
        """Count the prefill workers that have a prompt; a worker that decodes too may have requests and no prompt."""
        names = [name for name, role in self._roles.items() if role is Role.PREFILL]
        return sum(
            1 for name in names if (self._wait_s(name, ServiceClass.BE, now) if self._lends else self._num_at[name])
        )

    def decodes_only_elsewhere(self, node: str) -> bool:
        """Return whether there are decode workers, but none on this node."""
        nodes = {self._node[name] for name in self._roles if self._decodes(name)}
        return bool(nodes) and node not in nodes

    @property
    def memory(self) -> int:
        """Return the tokens that all workers that decode hold; 0 means not known."""
        return self._kv_tokens * self._num_decoding

    @property
    def _num_decoding(self) -> int:
        return self._num_workers[Role.DECODE] + self.num_lent

    @property
    def num_lent(self) -> int:
        """Return the number of prefill workers that decode, too."""
        return len(self._lent)

    @property
    def late(self) -> tuple[int, int]:
        """Return how many chats decode, as workers told last, and for how many the next token is late."""
        return sum(num for num, _ in self._late.values()), sum(late for _, late in self._late.values())

    def least_wait_s(self, role: Role, service: ServiceClass, now: float) -> float:
        """Return the shortest wait for other prompts at any worker."""
        worker = self._least(role, service, now)
        return 0.0 if worker is None else self._wait_s(worker, service, now)

    # --- Placement

    def ahead_of(self, request: Request, pools: Pools, now: float) -> WorkAhead:
        """Return the worker that would run the prompt if placed now, and the work ahead there.

        Admission decides by this, and `placed` takes the same answer: the worker is looked for once."""
        known, memory = self._known(request, pools), self.memory
        worker = self._worker_for(request, known, now)
        if worker is None:
            return WorkAhead(memory=memory)
        told, work = self._told(worker), self._work(worker, request, known)
        prompt_s, loaded_s = work.seconds(told.prompt_token_s), work.seconds(self._loaded_token_s(worker, request, now))
        wait_s = self._wait_s(worker, request.service, now) + max(0.0, loaded_s - prompt_s)  # others slow it down too
        return WorkAhead(
            wait_s,
            prompt_s,
            told.prompt_token_s,
            memory,
            self._num_workers[self._roles[worker]],
            worker,
            loaded_s,
            self._shortage(worker, request, now),
        )

    def _shortage(self, worker: str, request: Request, now: float) -> Shortage:
        """Return what memory the answers of all chats, with this chat, will lack before they end: on the decode worker
        that runs the prompt, or on all decode workers where a prefill worker runs the prompt."""
        is_looked_at = request.service is ServiceClass.RT and self._policy.refuse_ttfts and request.slo.is_asked
        if not is_looked_at or not self._kv_tokens:
            return NO_SHORTAGE
        if self._roles[worker] is not Role.DECODE:
            return self._answers.shortage_of_all(request, self.memory, now)
        members = dict.fromkeys(self._pools, 1 / max(1, self._num_workers[Role.DECODE]))
        members[worker] = 1.0
        return self._answers.shortage(request, members, self._kv_tokens, self.memory, now)

    @property
    def num_for_prompts(self) -> int:
        """Return how many workers can run prompts."""
        return self._num_decoding if self._lends else self._num_workers[self._prompts_on]

    def _worker_for(self, request: Request, known: Known, now: float) -> str | None:
        first = self._least(self._prompts_on, request.service, now)
        if first is None:
            return self._least(Role.DECODE, request.service, now) if self._lends else None
        if known.at and self._num_workers[self._prompts_on] > 1:
            first = self._earliest_first_token(first, request, known, now)
        if self._prompts_on is Role.DECODE:
            return first
        return self._helper(first, request, known, now) or first

    def _earliest_first_token(self, least: str, request: Request, known: Known, now: float) -> str:
        """Return the worker with the earliest first token: the least loaded, or one near its prefix.

        A beginning that all requests share would draw all to one worker, which would decode slowly: so a worker that
        holds much more than others does not count."""
        nodes = [node for node in known.nodes if self._decodes_at(node)] if len(self._run_prompts_at) > 1 else []
        others = [worker for node in nodes for worker in self._run_prompts_at.get(node, ())]
        others += [worker for worker in known.at if self._roles.get(worker) is self._prompts_on]
        first, least_held = least, self._held(least, request.service)
        first_s = self._wait_s(least, request.service, now) + self._prompt_s(least, request, known)
        is_first = self._policy.ordering.puts_first(request.service)
        for worker in others:
            prompts = self._prompts.get(worker, _NO_PROMPTS)
            wait_s = max(0.0, prompts.at + prompts.before(is_first) - now)
            if wait_s < first_s and (token_s := wait_s + self._prompt_s(worker, request, known)) < first_s:
                more = self._held(worker, request.service) - least_held
                if more <= _MORE_HELD * self._saved(worker, request, known):
                    first, first_s = worker, token_s
        return first  # among equals the least loaded

    def placed(self, worker: str, request: Request, loaded_s: float, now: float) -> str:
        """Add the prompt, with its time there, to the worker's backlog, and return the decode worker that the request
        should go on to, if any."""
        if (prompts := self._prompts.get(worker)) is not None:
            prompts.pass_time(now)
            prompts.all_s += loaded_s
            if request.service is ServiceClass.RT:
                prompts.rt_s += loaded_s
        if self._policy.reuse:
            self._pieces[request.id] = pieces = self._pieces_of(request)
            self._beginnings.came(pieces, worker)
        if self._roles.get(worker) is not Role.PREFILL:
            self._help[worker].add(loaded_s, now)
            return ""
        gives = request.service is ServiceClass.BE and self._policy.is_rt_first
        rooms = self._rooms_for(worker, request)
        if worker in self._lent and not self._is_worth_a_move(worker, request, rooms, now):
            return ""  # it goes on where its KV is
        named = rooms.choose(request.tokens, self._most(request), gives)
        if worker in self._lent:
            self._coming[request.id] = named
        return named

    def _is_worth_a_move(self, worker: str, request: Request, rooms: Rooms, now: float) -> bool:
        """Return whether a request is to leave the prompt's worker, which could decode it, for a decode worker.

        That worker must have room for the whole output, and next to no prompts to run: beside prompts a step would take
        longer than here, and the request would wait for that step's end. A chat leaves only where its second token will
        be in time, a best-effort request only where memory may be wanted here."""
        decode, (mean, most) = self._least(Role.DECODE, request.service, now), mean_and_upper(request, self._policy)
        if mean < self._policy.least_moved or decode is None:
            return False
        lately = self._help[decode]
        if now - lately.at < HELPED_S or lately.share(now) > MOST_HELP or self._wait_s(decode, ServiceClass.BE, now):
            return False
        if request.service is ServiceClass.RT and self._move_s(worker, decode, request) > request.slo.tbt_s:
            return False
        stays = request.service is ServiceClass.BE and self._holdings_of(worker).tokens <= self._kv_tokens
        return not stays and rooms.most_free >= rooms.blocks(len(request.prompt) + most)

    def _move_s(self, worker: str, decode: str, request: Request) -> float:
        """Return the time between the first two tokens of a request that leaves for a decode worker.

        The KV goes to the pool and back. A copy waits for the end of a step at either end, and then the request runs
        in a step. For example, 1,200 tokens take 9 ms a copy and a step 22 ms: 84 ms in all. Gain: on an RTX 4090 as
        1+1 with gaps of 35 ms asked for, 75 -> 100 % of chats in time at 2.8 a second, 89 -> 94 % at 5.6."""
        return 2 * self._told(worker).copying.seconds(len(request.tokens)) + 3 * self._answers.step_s(decode)

    def _rooms_for(self, worker: str, request: Request) -> Rooms:
        """Return the room of the node that the request should go on to."""
        own = self._rooms_of(worker)
        if own.most_free >= own.blocks(len(request.tokens)):
            return own
        return max(self._rooms.values(), key=lambda rooms: rooms.most_free)  # among equals the node that came first

    def _rooms_of(self, worker: str) -> Rooms:
        """Return the room of the decode workers of this worker's node."""
        node = self._node[worker]
        if node not in self._rooms:
            self._rooms[node] = Rooms(self._block_size, self._policy.batches_by_length, self._retention)
        return self._rooms[node]

    def _helper(self, prefill: str, request: Request, known: Known, now: float) -> str | None:
        """Return the decode worker that runs a prompt sooner than this prefill worker, where prompts pile up, or chats
        lack memory."""
        is_rt, lends = request.service is ServiceClass.RT, prefill in self._lent
        if not self._policy.helps or not (is_rt or lends):
            return None
        decode = self._least(Role.DECODE, request.service, now)
        if decode is None or self._node[decode] not in known.pools:
            return None
        first_s = self._first_token_s(prefill, request, known, now)
        if is_rt:
            rooms, told = self._rooms_of(decode), self._lent.get(prefill)
            blocks = rooms.blocks(len(request.prompt))
            if blocks > (rooms.for_chats(decode) or 0):
                return None  # there the prompt would wait for memory
            if told is not None and blocks > told:
                return decode  # and else here
            is_apart = not lends or decode in self._coming.values()
            share = QUEUE_SHARE_OF_TTFT if is_apart else QUEUE_SHARE_OF_TTFT_WHEN_PREFILL_DECODES
            if first_s <= share * request.slo.ttft_s:
                return None
        wins_s = PILED_BE_S if not is_rt and self._holdings_of(decode).rt_tokens else 0.0
        return decode if self._first_token_s(decode, request, known, now) < first_s - wins_s else None

    def _first_token_s(self, worker: str, request: Request, known: Known, now: float) -> float:
        """Return the seconds until the first token of a request that the worker would get now."""
        loaded_s = self._work(worker, request, known).seconds(self._loaded_token_s(worker, request, now))
        return self._wait_s(worker, request.service, now) + loaded_s

    def _wait_s(self, worker: str, service: ServiceClass, now: float) -> float:
        """Return the wait for the prompts that go before a new prompt of this class."""
        prompts = self._prompts.get(worker, _NO_PROMPTS)
        return max(0.0, prompts.at + prompts.before(self._policy.ordering.puts_first(service)) - now)

    def _known(self, request: Request, pools: Pools) -> Known:
        """Return how many of the prompt's first tokens devices and pools have."""
        return Known(self._beginnings.tokens_at(self._pieces_of(request)) if self._policy.reuse else {}, pools)

    def _pieces_of(self, request: Request) -> tuple[int, ...]:
        last, pieces = self._last
        if last is not request:
            pieces = pieces_of(request)
            self._last = request, pieces
        return pieces

    def _decodes_at(self, node: str) -> bool:
        return node in self._rooms and self._rooms[node].is_any

    def _work(self, worker: str, request: Request, known: Known) -> PromptWork:
        return known.work(len(request.tokens), worker, self._node[worker], self._told(worker))

    def _saved(self, worker: str, request: Request, known: Known) -> float:
        """Return the tokens that the worker need not compute, less the tokens that it could compute while copying."""
        work, token_s = self._work(worker, request, known), self._told(worker).prompt_token_s
        return len(request.tokens) - work.tokens - (work.copy_s / token_s if token_s else 0.0)

    def _prompt_s(self, worker: str, request: Request, known: Known) -> float:
        """Return the time of the prompt alone: to compute what neither device nor pool has, and to copy."""
        return self._work(worker, request, known).seconds(self._told(worker).prompt_token_s)

    def _loaded_token_s(self, worker: str, request: Request, now: float) -> float:
        is_first = self._policy.ordering.puts_first(request.service)
        return self._prompts.get(worker, _NO_PROMPTS).loaded_token_s(is_first, now)

    def _told(self, worker: str) -> Backlog:
        return self._prompts.get(worker, _NO_PROMPTS).told

    def _most(self, request: Request) -> int:
        return len(request.prompt) + mean_and_upper(request, self._policy)[1]

    def _update_load(self, name: str) -> None:
        """Order the worker again: it has come, or its work has changed."""
        if (role := self._roles.get(name)) is not None:
            for loads in self._loads[role].values():
                loads.changed.add(name)

    def _least(self, role: Role, service: ServiceClass, now: float) -> str | None:
        """Return the worker with the least work before a new request of this class.

        Only here are changed workers ordered again, since most change more than once between two requests."""
        loads, is_first = self._loads[role][service], self._policy.ordering.puts_first(service)
        while loads.changed:
            name = loads.changed.pop()
            prompts, holdings = self._prompts.get(name, _NO_PROMPTS), self._holdings_of(name)
            held = holdings.rt_tokens if is_first else holdings.tokens
            loads.put(name, prompts.at + prompts.before(is_first), held, now)
        return loads.least(now)

    def _held(self, worker: str, service: ServiceClass) -> int:
        """Return the tokens that requests of the worker will hold, of requests before a new request of this class."""
        holdings = self._holdings_of(worker)
        return holdings.rt_tokens if self._policy.ordering.puts_first(service) else holdings.tokens
