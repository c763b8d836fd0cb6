"""Choose the worker that runs a prompt, and the decode worker that the request should go on to.

Every worker that may run the prompt has a cost in seconds, and the prompt goes where that is least:

    first token   the prompts before it, then its own prompt, less what device or pool of the node have of it (held.py)
    memory        a quarter of a token's time for each token that its requests hold more than those of its like: workers
                  that hold more decode slower, and lack memory sooner; gain as 2xcolocated: P95 of first tokens -13 %
    no room       WITHOUT_ROOM_S where a chat finds no memory for its prompt
    roles         a decode worker among prefill workers costs a chat at least a quarter of its ttft: it gets chats'
                  prompts that pile up, and documents' as any other

Where promises decide the order, only chats' prompts run before a chat's prompt. Prefill workers run the prompts, or
decode workers where there are no others (colocated).

From a prefill worker the request goes on to a decode worker of the same node with room, else to the one with most room:
the KV travels there by the collective transport, and the request stays there. Prefill workers decode, too, unless the
policy keeps them apart: they *lend* memory and time. Then a request goes on only where that is worth it, and else stays
where the KV is. So roles follow the load:

    prompts pile up    decode workers take prompts, those of chats where they have room
    decodes pile up    requests stay on the workers of their prompts; requests that had to leave come back to any
    no prefill worker  decode workers take all prompts
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from math import inf
from typing import NamedTuple, TypeAlias

from alignedserve.core import KEEPS_ALL, Request, Retention, Role, ServiceClass
from alignedserve.protocol.messages import Backlog, Member, Report
from alignedserve.router.placing.admission import WorkAhead
from alignedserve.router.placing.answers import NO_SHORTAGE, Answer, Shortage, shortage
from alignedserve.router.placing.held import Beginnings, HeldMemory, Holdings, pieces_of
from alignedserve.router.placing.workers import KnownWorker
from alignedserve.scheduling.lengths import mean_and_upper
from alignedserve.scheduling.policy import Policy

QUEUE_SHARE_OF_TTFT = 0.25  # prompts have piled up when a chat would wait for this share of the ttft
WITHOUT_ROOM_S = 60.0
HELD_PER_TOKEN = 4  # tokens more that a worker may hold than another, for each token that it need not compute
MOST_HELP_S = 0.5  # of prompts that a decode worker ran lately: beyond that it gets no requests
Pools: TypeAlias = Mapping[str, str]  # node -> name of its pool


class _OpenChat(NamedTuple):
    request: Request
    tokens: float  # of output, when it came to the member that has it
    since: float | None  # the steps that the worker had run then; None: the chat does not decode


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
        self._policy, self._block_size, self._kv_tokens, self._retention = policy, block_size, kv_tokens, retention
        self._prompts_on, self._lends = prompts_on, lends
        self._workers: dict[str, KnownWorker] = {}
        self._holdings = defaultdict[str, Holdings](partial(Holdings, policy, retention))  # member -> of its requests
        self._chats = defaultdict[str, dict[str, _OpenChat]](dict)  # member -> its chats
        self._most = Counter[str]()  # member -> tokens that these hold if all outputs get as long as possible
        self._beginnings = Beginnings()
        self._last: tuple[Request | None, tuple[int, ...]] = (None, ())  # the last prompt, and the pieces
        self._pieces: dict[str, tuple[int, ...]] = {}  # request on a worker -> pieces of the prompt

    # --- Workers, and the work that they have

    def add_worker(self, member: Member) -> None:
        """Place on the worker from now on: it is new, has started again, or may run others again."""
        known = self._workers.get(member.name)
        if known is None or known.member != member:
            self._workers[member.name] = known = KnownWorker(member)
        known.is_open = True

    def withdraw(self, name: str) -> None:
        """Place nothing on the worker until it is added again."""
        if (worker := self._workers.get(name)) is not None:
            worker.is_open = False

    def remove_worker(self, name: str) -> None:
        self._workers.pop(name, None)
        self.forget_kv(name)

    def forget_kv(self, member: str) -> None:
        """Note that a worker or pool has started again, or is gone, with all that it had."""
        self._beginnings.forget(member)

    def progressed(self, name: str, backlog: Backlog, free_blocks: int, now: float) -> None:
        if (worker := self._workers.get(name)) is not None:
            worker.tell(backlog, now)
            worker.free_blocks = free_blocks

    def note_room(self, name: str, free_blocks: int) -> None:
        if (worker := self._workers.get(name)) is not None:
            worker.free_blocks = free_blocks

    def reported(self, name: str, report: Report, now: float) -> None:
        if (worker := self._workers.get(name)) is not None and worker.decodes:
            worker.report(report, now)

    def note_prefix(self, request: Request, node: str, pools: Pools) -> None:
        """Remember that the KV of the prompt is on this node, where the pool keeps it."""
        if self._policy.reuse and node in pools:
            self._beginnings.came(self._pieces.pop(request.id, None) or self._pieces_of(request), pools[node])

    # --- Requests

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
        self._holdings[member].put(request, held)
        if request.service is ServiceClass.RT:
            worker, so_far = self._workers.get(member), len(request.emitted) if tokens is None else tokens
            since = worker.steps(now) if worker is not None and worker.decodes and not has_prompt else None
            self._forget_chat(member, request.id)
            self._chats[member][request.id] = _OpenChat(request, so_far, since)
            self._most[member] += request.most_tokens

    def moved(self, before: str, to: str, request: Request, now: float) -> None:
        """Note that a request has left one member for another."""
        chat = self._chats[before].get(request.id)
        tokens = None if chat is None else self._num_output(before, chat, now)
        self.add_request(to, request, now, self.remove_request(before, request), tokens)

    def remove_request(self, member: str, request: Request) -> HeldMemory | None:
        """Note that a request has left the member, and return the memory that was expected."""
        self._forget_chat(member, request.id)
        self._pieces.pop(request.id, None)
        return self._holdings[member].remove(request.id)

    def _forget_chat(self, member: str, request: str) -> None:
        if (chat := self._chats[member].pop(request, None)) is not None:
            self._most[member] -= chat.request.most_tokens

    def _num_output(self, member: str, chat: _OpenChat, now: float) -> float:
        """Return about how many tokens of output the chat has."""
        worker = self._workers.get(member)
        return chat.tokens + (0.0 if worker is None or chat.since is None else worker.steps(now) - chat.since)

    # --- The load (sizing.py)

    def _of_kind(self, kind: Role) -> list[KnownWorker]:
        return [worker for worker in self._workers.values() if worker.is_open and worker.kind is kind]

    @property
    def _decoding(self) -> list[KnownWorker]:
        return [worker for worker in self._workers.values() if worker.is_open and worker.decodes]

    def num_workers(self, kind: Role) -> int:
        return len(self._of_kind(kind))

    def num_at(self, member: str) -> int:
        return len(self._holdings[member])

    @property
    def num_lent(self) -> int:
        """Return the number of prefill workers that decode, too."""
        return sum(worker.member.lends for worker in self._decoding)

    @property
    def num_for_prompts(self) -> int:
        """Return how many workers can run prompts."""
        return len(self._decoding) if self._lends else self.num_workers(self._prompts_on)

    def num_with_prompts(self, now: float) -> int:
        """Count the prefill workers that have a prompt."""
        return sum(worker.wait_s(False, now) > 0 for worker in self._of_kind(Role.PREFILL))

    @property
    def emptiest(self) -> str | None:
        """Return the decode worker that has the fewest requests."""
        names = [worker.name for worker in self._of_kind(Role.DECODE)]
        return min(names, key=self.num_at, default=None)

    def decodes_only_elsewhere(self, node: str) -> bool:
        """Return whether there are decode workers, but none on this node."""
        nodes = {worker.member.node for worker in self._decoding}
        return bool(nodes) and node not in nodes

    @property
    def memory(self) -> int:
        """Return the tokens that all workers that decode hold; 0 means not known."""
        return self._kv_tokens * len(self._decoding)

    @property
    def late(self) -> tuple[int, int]:
        """Return how many chats decode, as workers told last, and for how many the next token is late."""
        return sum(worker.num_rt for worker in self._decoding), sum(worker.num_late for worker in self._decoding)

    def least_wait_s(self, kind: Role, service: ServiceClass, now: float) -> float:
        """Return the shortest wait for other prompts at any worker."""
        is_first = self._policy.ordering.puts_first(service)
        return min((worker.wait_s(is_first, now) for worker in self._of_kind(kind)), default=0.0)

    # --- The worker of a prompt

    def ahead_of(self, request: Request, pools: Pools, now: float) -> WorkAhead:
        """Return the worker that would run the prompt if placed now, and the work ahead there.

        Admission decides by this, and `placed` takes the same answer: the worker is looked for once."""
        found = self._beginnings.tokens_at(self._pieces_of(request)) if self._policy.reuse else {}
        offers = [
            (worker, self._ahead_on(worker, request, found, pools, now)) for worker in self._candidates(request, pools)
        ]
        if not offers:
            return WorkAhead(memory=self.memory)
        least_held = dict[Role, int]()
        for worker, ahead in offers:
            kind = worker.kind
            least_held[kind] = min(ahead.held, least_held.get(kind, ahead.held))
        worker, ahead = min(offers, key=lambda offer: (self._cost_s(*offer, request, least_held), offer[1].held))
        ahead.num_workers, ahead.memory = self.num_workers(worker.kind), self.memory
        ahead.shortage = self._shortage(worker, request, now)
        return ahead

    def _candidates(self, request: Request, pools: Pools) -> list[KnownWorker]:
        """Return the workers that may run the prompt."""
        found = self._of_kind(self._prompts_on)
        if not found:
            return self._of_kind(Role.DECODE) if self._lends else []
        helps = self._policy.helps and (self._lends or request.service is ServiceClass.RT)
        if self._prompts_on is Role.PREFILL and helps:
            others = [worker for worker in self._of_kind(Role.DECODE) if worker.member.node in pools]
            found += [worker for worker in others if worker.free_blocks is not None]
        return found

    def _ahead_on(
        self, worker: KnownWorker, request: Request, found: Mapping[str, int], pools: Pools, now: float
    ) -> WorkAhead:
        """Return the work ahead of a request on this worker. `found` says how many of the prompt's first tokens places
        have. The worker copies what only its node's pool has where that takes less time than computing it."""
        is_first, told = self._policy.ordering.puts_first(request.service), worker.told
        here, there = found.get(worker.name, 0), found.get(pools.get(worker.member.node, ""), 0)
        copied = max(0, there - here)
        copy_s = told.copying.seconds(copied) if copied else 0.0
        if 0 < copied * told.prompt_token_s < copy_s:  # it is computed sooner
            copied, copy_s = 0, 0.0
        tokens = len(request.tokens) - here - copied
        prompt_s = copy_s + tokens * told.prompt_token_s
        loaded_s = copy_s + tokens * worker.loaded_token_s(is_first, now)
        return WorkAhead(
            worker.wait_s(is_first, now) + max(0.0, loaded_s - prompt_s),  # others slow it down, too
            prompt_s,
            told.prompt_token_s,
            worker=worker.name,
            loaded_s=loaded_s,
            held=self._holdings[worker.name].rt_tokens if is_first else self._holdings[worker.name].tokens,
        )

    def _cost_s(self, worker: KnownWorker, ahead: WorkAhead, request: Request, least_held: Mapping[Role, int]) -> float:
        """Return what it costs to place the request on this worker. `least_held` are the tokens that requests hold at
        least on a worker of each kind."""
        kind, is_rt = worker.kind, request.service is ServiceClass.RT
        cost_s = ahead.prompts_s + ahead.prompt_s
        if is_rt and kind is Role.DECODE and Role.PREFILL in least_held:
            cost_s = max(cost_s, QUEUE_SHARE_OF_TTFT * request.slo.ttft_s)
        if is_rt and worker.decodes and worker.for_chats < self._blocks(len(request.prompt)):
            cost_s += WITHOUT_ROOM_S
        return cost_s + (ahead.held - least_held[kind]) * ahead.token_s / HELD_PER_TOKEN

    def _shortage(self, worker: KnownWorker, request: Request, now: float) -> Shortage:
        """Return what memory the answers of all chats, with this chat, will lack before they end: on the decode worker
        that runs the prompt, with its part of the chats in pools, or on all decode workers where a prefill worker runs
        the prompt."""
        is_looked_at = request.service is ServiceClass.RT and self._policy.refuse_ttfts and request.slo.is_asked
        if not is_looked_at or not self._kv_tokens:
            return NO_SHORTAGE
        if worker.kind is Role.PREFILL:
            parts, capacity, workers = dict.fromkeys(self._chats, 1.0), self.memory, self._decoding
        else:
            pools = [member for member in self._chats if member not in self._workers]
            parts = dict.fromkeys(pools, 1 / self.num_workers(Role.DECODE)) | {worker.name: 1.0}
            capacity, workers = self._kv_tokens, [worker]
        most = request.most_tokens + sum(part * self._most[member] for member, part in parts.items()) - capacity
        if most <= 0 or not self._policy.grows:
            return Shortage(most, 0.0)  # as mostly: memory suffices even if all outputs get as long as possible
        answers = [
            Answer(chat.request, self._num_output(member, chat, now), part)
            for member, part in parts.items()
            for chat in self._chats[member].values()
        ]
        step_s = max((worker.step_s for worker in workers), default=0.0)
        return shortage([*answers, Answer(request)], capacity, step_s, self._policy, self._retention)

    # --- The decode worker that a request goes on to

    def placed(self, name: str, request: Request, loaded_s: float, now: float) -> str:
        """Add the prompt, with its time there, to the worker's backlog, and return the decode worker that the request
        should go on to, if any."""
        worker, is_rt = self._workers[name], request.service is ServiceClass.RT
        worker.add_prompt(loaded_s, is_rt, now)
        if self._policy.reuse:
            self._pieces[request.id] = pieces = self._pieces_of(request)
            self._beginnings.came(pieces, name)
        if worker.kind is Role.DECODE:
            worker.helped.add(loaded_s, now)
            return ""
        decode = self._goes_on_to(worker, request, now)
        if decode is None or decode.free_blocks is None:
            return ""
        taken = self._blocks(len(request.tokens))
        decode.free_blocks -= taken
        decode.given_blocks += 0 if is_rt or not self._policy.is_rt_first else taken
        return decode.name

    def _goes_on_to(self, worker: KnownWorker, request: Request, now: float) -> KnownWorker | None:
        """Return the decode worker with most room on this worker's node, else anywhere; with batches by length, the one
        whose batch has lengths like the request's and room for all of it."""
        workers = [decode for decode in self._of_kind(Role.DECODE) if decode.free_blocks is not None]
        if worker.decodes:
            workers = [decode for decode in workers if self._is_worth_a_move(worker, decode, request, now)]
        length, most = len(request.tokens), len(request.prompt) + mean_and_upper(request, self._policy)[1]

        def place_of(decode: KnownWorker) -> tuple[bool, float, float, str]:
            free = decode.free_blocks or 0
            is_near = decode.member.node == worker.member.node and free >= self._blocks(length)
            fits = self._policy.batches_by_length and decode.band is not None
            fits = fits and free >= self._blocks(max(most, length))
            return not is_near, decode.distance(length) if fits else inf, -free, decode.name

        return min(workers, key=place_of, default=None)

    def _is_worth_a_move(self, worker: KnownWorker, decode: KnownWorker, request: Request, now: float) -> bool:
        """Return whether a request is to leave the prompt's worker, which could decode it, for this decode worker.

        It must have room for the whole output, and next to no prompts to run: beside prompts a step would take longer
        than here, and the request would wait for that step's end. A document leaves only where memory may be wanted
        here, a chat only where its second token will be in time: the KV goes to the pool and back, a copy waits for the
        end of a step at either end, and then the request runs in a step. For example, 1,200 tokens take 9 ms a copy and
        a step 22 ms: 84 ms in all.

        Gains, on an RTX 4090 as 1+1: of the time until the second token, with gaps of 35 ms asked for, 75 -> 100 % of
        chats in time at 2.8 a second, 89 -> 94 % at 5.6; of MOST_HELP_S 5 to 18 % more tokens of documents beside
        chats."""
        mean, upper = mean_and_upper(request, self._policy)
        has_room = decode.free_blocks is not None and decode.free_blocks >= self._blocks(len(request.prompt) + upper)
        if mean < self._policy.least_moved or not has_room or decode.wait_s(False, now):
            return False
        if decode.helped.sum(now) > MOST_HELP_S:
            return False
        if request.service is ServiceClass.BE:
            return self._holdings[worker.name].tokens > self._kv_tokens
        move_s = 2 * worker.told.copying.seconds(len(request.tokens)) + 3 * decode.step_s
        return move_s <= request.slo.tbt_s

    def _pieces_of(self, request: Request) -> tuple[int, ...]:
        last, pieces = self._last
        if last is not request:
            pieces = pieces_of(request)
            self._last = request, pieces
        return pieces

    def _blocks(self, tokens: int) -> int:
        """Return the blocks that a request with a prompt of `tokens` tokens takes on arrival."""
        return self._retention.of_prompt(tokens) // self._block_size + 1
