"""Mutants of the pool's core, and of the transport's decisions."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_STATE, _PAGES = "kvpool/state.py", "kvpool/memory/pages.py"

POOL = (
    Mutant(
        "commit of another's entry",
        _STATE,
        "out is not None and out[0] != worker and (_attempt(out[1]) == _attempt(entry))",
        "False",
        "A worker that was taken for dead commits a request that another worker has.",
    ),
    Mutant(
        "prefix of a lost worker kept",
        _STATE,
        "for request in [request for request, (worker, _) in self._held.items() if worker == name]:\n"
        "    self._let_go_of_prefix(request)",
        "",
        "The pool holds prefixes for a worker that is gone.",
    ),
    Mutant(
        "released prefix stays held",
        _STATE,
        "if to in self._decode_workers:\n"
        "    self._held[request] = to, (request, attempt)\n"
        "    return [Send(to, Kept(request, attempt, self._pages.pages_of(request)))]\n"
        "self._let_go_of_prefix(request)",
        "",
        "A worker that lets go of a prompt leaves the pool holding the pages of its prefix.",
    ),
    Mutant(
        "any worker may release",
        _STATE,
        "self._is_out(worker, request, attempt)",
        "request in self._out",
        "A late Release frees the pages of a request that another worker has.",
    ),
    Mutant(
        "cancelled request taken",
        _STATE,
        "unwanted or (request.id, request.attempt) in self._cancelled",
        "unwanted",
        "A Commit that comes after its Cancel waits in the pool.",
    ),
    Mutant(
        "cancel of a waiting attempt ignored",
        _STATE,
        "waiting.request.attempt <= attempt",
        "waiting.request.attempt < attempt",
        "A waiting request is handed out although it was cancelled.",
    ),
    Mutant(
        "requests of a lost worker kept out",
        _STATE,
        "self._waiting.back((self._waiter(entry, now) for entry in entries if _attempt(entry) not in self._cancelled))",
        "for entry in entries:\n    self._pages.free_entry(entry.request.id)",
        "What a lost worker had not begun is forgotten, and recomputed.",
    ),
    Mutant(
        "spoiled page keeps its name",
        _STATE,
        "self._pages.forget(page)",
        "",
        "Other prompts get a page that does not hold what its name says.",
    ),
    Mutant(
        "pages of a lost answer stay leased",
        _PAGES,
        "self.give_back(holder, sorted(self.leased_to(holder) - set(kept)))",
        "",
        "Pages whose lease was lost on the way are never free again.",
    ),
    Mutant(
        "evicted page keeps its name",
        _PAGES,
        "del self._named[name]\nself._evicted.note(name)",
        "self._evicted.note(name)",
        "Prompts get a page that holds other KV by now.",
    ),
    Mutant(
        "page of a running request compressed",
        "kvpool/memory/compression.py",
        "done and self._waits_only(page)",
        "done",
        "A page that a worker reads by its number gives place to another.",
    ),
    Mutant(
        "compressed pages of a dead holder kept",
        "kvpool/memory/compression.py",
        "self._pages.compressed(lease_to_compress(holder), page, take=False)",
        "",
        "Pages into which a dead worker compressed are never free again.",
    ),
)

_CHANNEL, _RECEIVING, _MEETING = (f"alignedserve/transport/{name}.py" for name in ("channel", "ends", "meeting"))

TRANSPORT = (
    Mutant(
        "another transfer's header taken",
        _RECEIVING,
        "header == expected",
        "header.number == expected.number",
        "KV of other tokens than were announced is written to the blocks.",
    ),
    Mutant(
        "broken chunk written",
        _RECEIVING,
        "read_places(self._next_frame(group, PLACES, places_bytes(0)), number)[1] == checksum",
        "True",
        "A transfer whose checksum is wrong counts.",
    ),
    Mutant(
        "transfer given up is awaited",
        _MEETING,
        "self._past = max(self._past, note.number)",
        "",
        "An end waits for a transfer that the other end has given up.",
    ),
    Mutant(
        "closed channel ends nothing",
        _CHANNEL,
        "self._fail(list(self._outstanding))",
        "",
        "Transfers of a worker that is gone never end.",
    ),
)
