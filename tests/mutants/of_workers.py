"""Mutants of the cores of prefill and decode workers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_DECODE, _WORKER = "decode_worker", "alignedserve/worker"
_OFFERING = f"{_WORKER}/offering.py"

_NAMED = f"{_WORKER}/step/blocks.py"

SHARED_PAGES = (
    Mutant(
        "chats wait for documents",
        f"{_WORKER}/step/device_pages.py",
        "prompt is not None and _order(prompt) <= _order(waiting)",
        "prompt is not None",
        "A chat waits for a page that a document computes, which runs when no chat does.",
    ),
    Mutant(
        "a reader of a page too few",
        _NAMED,
        "page.num_readers += 1",
        "page.num_readers += not page.num_readers",
        "A page that two requests share is given to others when the first of them ends.",
    ),
    Mutant(
        "pages shared before they are computed",
        f"{_WORKER}/step/device_pages.py",
        "self._name(running, running.prefix)",
        "self._name(running, min(running.num_tokens, running.prefix + self._page_size))",
        "A request reads a page that another one is only about to compute.",
    ),
    Mutant(
        "doubtful pages stay shared",
        f"{_WORKER}/step/device_pages.py",
        "self._blocks.forget(running.block_names)",
        "",
        "KV from which no token could be sampled is shared with the next request.",
    ),
    Mutant(
        "what goes on from a forgotten page is found",
        _NAMED,
        "leaving += page.after.values()",
        "",
        "KV that was computed from doubtful KV is shared as soon as the page before it is recomputed.",
    ),
    Mutant(
        "an evicted page is found",
        _NAMED,
        "del self._named[page.name]",
        "",
        "A request reads a page whose blocks were given to others.",
    ),
)

PREFILL = (
    Mutant(
        "spoiled pages not named",
        "decode_worker/joining.py",
        "self._pool.tell_spoiled(pages)",
        "list[Command]()",
        "The pool does not hear that pages do not hold what their names say.",
    ),
    Mutant(
        "late prefix kept",
        "alignedserve/worker/arriving.py",
        "self._holds.decline(attempt, now) if pages else []",
        "[]",
        "The pool holds a prefix for a prompt that is not there any more.",
    ),
    Mutant(
        "old pool's pages stay known to prompts",
        "alignedserve/worker/arriving.py",
        "for running in self._here.of(*OCCUPYING, State.WAITING, State.CANDIDATE):\n    running.forget_known()",
        "",
        "A prompt names pages of a pool that died, in which the next pool has other KV.",
    ),
    Mutant(
        "failed transfer counts as sent",
        _OFFERING,
        "if not event.ok:\n    return [departure.ask]",
        "",
        "A request whose transfer failed is forgotten.",
    ),
    Mutant(
        "declined while it is sent",
        _OFFERING,
        "departure.is_declined = True",
        "",
        "A request that was declined while it was sent goes on nowhere.",
    ),
    Mutant(
        "prompts go to a pool from which no worker decodes",
        "decode_worker/leaving.py",
        "pool is None or self._keeps or all((peer.node != pool.node for peer in peers))",
        "pool is None or self._keeps",
        "Requests are committed to a pool that no decode worker reads.",
    ),
    Mutant(
        "repeated pull sent again",
        _OFFERING,
        "number <= self._pulled[receiver]",
        "number < self._pulled[receiver]",
        "A Pull that comes twice is answered twice.",
    ),
    Mutant(
        "output kept beside the decode worker's",
        "decode_worker/pool_traffic.py",
        "self._outputs.forget([running.request.id])",
        "",
        "A prefill worker keeps the outputs of requests that have gone on.",
    ),
    Mutant(
        "buffer freed while it is read",
        "alignedserve/forms/buffers.py",
        "buffer.is_at_rest",
        "buffer in self._buffers",
        "Blocks of prefetched KV are free while a copy or a transfer uses them.",
    ),
    Mutant(
        "an early pull finds nothing",
        "alignedserve/forms/buffers.py",
        "pulls and (not self._is_coming(pulls[0][1], receiver))",
        "pulls",
        "KV that its worker pulls back before its arrival is known is recomputed.",
    ),
    Mutant(
        "an early pull is not answered",
        "alignedserve/forms/buffers.py",
        "*self._answer(event.source)",
        "",
        "A worker waits until its time-out for KV that it pulled back before its arrival was known.",
    ),
)

DECODE = (
    Mutant(
        "superseded batch not released",
        f"{_DECODE}/arriving.py",
        "over.append(Send(pool, Release(name, attempt)))",
        "",
        "The pool keeps the pages of an attempt whose next one the worker has.",
    ),
    Mutant(
        "copied KV is never in doubt",
        f"{_DECODE}/joining.py",
        "running.came_with(running.prefix)\nself._tag(first, running, now)",
        "self._tag(first, running, now)",
        "A request fails because of a spoiled page, though another attempt could answer it.",
    ),
    Mutant(
        "bad copy not released",
        f"{_DECODE}/joining.py",
        "[*self._pool.tell_spoiled(pages), *self._holds.release(running.key)]",
        "[*self._pool.tell_spoiled(pages)]",
        "The pool keeps the pages of a request whose copy was not intact.",
    ),
    Mutant(
        "blocks of a bad copy lost",
        f"{_DECODE}/joining.py",
        'self._memory.release(running)\nself._notes.note("lost", running.key)',
        'self._notes.note("lost", running.key)',
        "Blocks are never free again.",
    ),
    Mutant(
        "partial page counts as known",
        f"{_WORKER}/step/request.py",
        "entry.prefix // page_size",
        "-(-entry.prefix // page_size)",
        "A worker that gives a request up does not write its last page again.",
    ),
    Mutant(
        "partial page of a copy counts as known",
        f"{_DECODE}/arriving.py",
        "len(running.request.tokens) // self._limits.page_size",
        "-(-len(running.request.tokens) // self._limits.page_size)",
        "The same, where the pool's copy came later than the KV.",
    ),
    Mutant(
        "two attempts in one worker",
        f"{_DECODE}/joining.py",
        "commands += self._here.drop(first.key[0], first.key[1] - 1)",
        "",
        "An older attempt runs beside the one that joins.",
    ),
    Mutant(
        "blocks freed while they are sent",
        _OFFERING,
        "if departure.number is None:\n"
        "    self.remove(departure)\n"
        "else:\n"
        "    self._here.move(running, State.ABANDONED)",
        "self.remove(departure)",
        "Blocks of a request that leaves and is cancelled are free while they are sent.",
    ),
    Mutant(
        "retiring worker takes offers",
        f"{_DECODE}/arriving.py",
        "source is None or self._here.is_retiring or (not is_taken)",
        "source is None or not is_taken",
        "A worker that retires takes new requests.",
    ),
    Mutant(
        "cancelled offer taken",
        f"{_DECODE}/arriving.py",
        "(name, attempt) in self._cancelled",
        "False",
        "An offer that comes after its Cancel waits for room, and keeps others from it.",
    ),
    Mutant(
        "only the newest cancelled attempt is known",
        "alignedserve/protocol/cancelled.py",
        "self._newest.get(request, -1) >= number",
        "self._newest.get(request, -1) == number",
        "A late message about an attempt before the cancelled one is heard.",
    ),
    Mutant(
        "a late cancel takes back a newer one",
        "alignedserve/protocol/cancelled.py",
        "max",
        "min",
        "A late Cancel of an earlier attempt makes the newer one count as wanted again.",
    ),
    Mutant(
        "pages of a cancelled candidate kept",
        f"{_DECODE}/state.py",
        "self.pool_link.holds.release_all(running.key for running in dropped)",
        "list[Command]()",
        "The pool keeps the pages of a candidate that was cancelled.",
    ),
    Mutant(
        "old pool's pages stay known to what was on its way there",
        f"{_DECODE}/pool_traffic.py",
        "running.forget_known()\nself._queue.put_back(running)",
        "self._queue.put_back(running)",
        "A request that was being written names pages of a pool that died when it goes to the next pool.",
    ),
    Mutant(
        "failed pull forgotten",
        f"{_DECODE}/joining.py",
        "[*released, Send(source.name, Decline(*attempt, is_failed=True))]",
        "[]",
        "The sender of KV that did not arrive is not told.",
    ),
    Mutant(
        "pages of a transfer outlive their pool",
        f"{_DECODE}/arriving.py",
        "self._here.of(State.CANDIDATE, State.RECEIVING)",
        "self._here.of(State.CANDIDATE)",
        "A request whose transfer failed is copied from pages of a pool that died.",
    ),
    Mutant(
        "evicted request seated from another's KV",
        _OFFERING,
        "departure is None or departure.number is not None or departure.to.holder != receiver",
        "departure is None or departure.number is not None",
        "KV goes to a later life of the worker than that which was to have it.",
    ),
)

WORKER = (
    Mutant(
        "blocks freed during a step",
        f"{_WORKER}/memory.py",
        "if not self.steps.leave(blocks):\n    self.give(blocks)",
        "self.give(blocks)",
        "Blocks of a request that is dropped are free while a step writes to them.",
    ),
    Mutant(
        "blocks freed a step too early",
        f"{_WORKER}/in_flight.py",
        "free = [blocks for last, blocks in self._left if last <= all_to]\n"
        "self._left = [(last, blocks) for last, blocks in self._left if last > all_to]",
        "free = [blocks for last, blocks in self._left]\nself._left = []",
        "With a step planned ahead, blocks are free while that step writes to them.",
    ),
    Mutant(
        "step after a failed one counts",
        f"{_WORKER}/in_flight.py",
        "plan.number != self._discarded_step",
        "True",
        "Tokens of a step that went on from nothing are emitted.",
    ),
    Mutant(
        "answer to an earlier ask taken",
        f"{_WORKER}/pool.py",
        "if lease.number != self._asks:\n    return",
        "",
        "A worker counts pages as its own that it gave back with its next ask.",
    ),
    Mutant(
        "copies to a lost pool forgotten",
        f"{_WORKER}/pool.py",
        "pool is None or pool.holder in self._copies_before.values()",
        "pool is None",
        "A pool that came back leases pages to others to which a copy still writes.",
    ),
    Mutant(
        "unwanted copy handed on",
        f"{_WORKER}/pool.py",
        "copy.wanted = False",
        "pass",
        "A request that was dropped while it was copied is committed.",
    ),
    Mutant(
        "outputs of a lost owner kept",
        f"{_WORKER}/owners.py",
        "self.forget([name for name, kept in self._kept.items() if kept.request.owner == owner])",
        "",
        "A worker keeps outputs whose owner is gone.",
    ),
    Mutant(
        "retired before owners have all",
        f"{_WORKER}/reporting.py",
        "not self._outputs.num_kept",
        "True",
        "A worker ends before owners have acknowledged its outputs.",
    ),
    Mutant(
        "unknown attempts not released",
        f"{_WORKER}/reporting.py",
        "[command for attempt in left for command in self._holds.decline(attempt, now)]",
        "[]",
        "A pool that asks for an attempt that is not there any more keeps its pages.",
    ),
    Mutant(
        "token of a request at another place",
        f"{_DECODE}/running.py",
        "part.kv is not running.kv and (not running.is_at(part))",
        "False",
        "A step's token goes to the request's next attempt.",
    ),
    Mutant(
        "seated chat's own pages are taken off",
        f"{_WORKER}/step/device_pages.py",
        "0 if running.blocks else self._blocks.num_read_once(self._found(running))",
        "len(running.blocks) if running.blocks else self._blocks.num_read_once(self._found(running))",
        "A chat that has a seat finds less memory in the place of documents than they give back.",
    ),
)
