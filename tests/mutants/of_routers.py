"""Mutants of the router's core."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_STATE, _RECOVERY = "router/state.py", "router/members.py"

ROUTER = (
    Mutant(
        "refused after it was admitted",
        _STATE,
        "known is None and request.attempt == 0",
        "known is None",
        "The next attempt of a request is refused where a queue is full, and its client waits for it for ever.",
    ),
    Mutant(
        "dead life taken back",
        _STATE,
        "member.incarnation <= self._dead.get(member.name, -1)",
        "member.incarnation < self._dead.get(member.name, -1)",
        "A process that was given up for dead is a member again, and has what others got.",
    ),
    Mutant(
        "frames of a lost member heard",
        _STATE,
        "known if known is not None and known.incarnation == incarnation else None",
        "known",
        "The router hears what a member's earlier life has sent.",
    ),
    Mutant(
        "lost attempt runs on",
        _STATE,
        "[*self._cancel_everywhere(request.id, request.attempt), lost]",
        "[lost]",
        "An attempt that was given up is not cancelled.",
    ),
    Mutant(
        "earlier attempts run on",
        _STATE,
        "self._cancel_everywhere(request.id, request.attempt - 1) if request.attempt else []",
        "list[Command]()",
        "Earlier attempts run beside the next one.",
    ),
    Mutant(
        "cancel of a prompt that waits ignored",
        _STATE,
        "opened is None or opened.request.attempt > attempt",
        "opened is None or opened.is_waiting or opened.request.attempt > attempt",
        "A request that waits for a place is served although its client has left.",
    ),
    Mutant(
        "placed during the recovery",
        _STATE,
        "if not self._recovery.is_on:\n    commands += self._place(now)",
        "commands += self._place(now)",
        "A new router places requests that members hold already.",
    ),
    Mutant(
        "unknown attempt waited for",
        _STATE,
        "opened.at == member.name or key in progress.lost",
        "key in progress.lost",
        "An attempt that its holder does not know is never given up.",
    ),
    Mutant(
        "requests of a lost pool waited for",
        _STATE,
        "self._give_up(opened, died, alone, not died) if is_worker else self._give_up(opened)",
        "self._give_up(opened, died, alone, not died) if is_worker else []",
        "What waited in a pool that died is not given up.",
    ),
    Mutant(
        "requests on their way to a lost pool forgotten",
        _STATE,
        "commands += self._inquire([opened for opened in self._open if opened.state is State.PREFILL], now)",
        "",
        "The router asks late for requests that were committed to a pool that died.",
    ),
    Mutant(
        "returned request stays with its worker",
        _STATE,
        "self._arrive(opened, pool, Fact.RETURNED, now)",
        "[]",
        "The router gives a request up with a worker that had given it to the pool.",
    ),
    Mutant(
        "left pool waited for",
        _STATE,
        "to.node in self._left or opened.request.is_suspect",
        "opened.request.is_suspect",
        "A request that comes to a pool from which no worker decodes waits there for ever.",
    ),
    Mutant(
        "bare pool not left",
        _STATE,
        "bare & self._without_decode",
        "set[str]()",
        "What waits in a pool whose decode workers stay away waits for ever.",
    ),
    Mutant(
        "unknown attempt of an owner ignored",
        _STATE,
        "[key for key in attempts if self._open.is_unknown(key)]",
        "list[Attempt]()",
        "An owner that asks for an attempt that nobody has gets no answer.",
    ),
    Mutant(
        "requests of a lost owner run on",
        _STATE,
        "commands += self._cancel_open(opened)",
        "",
        "Requests of a gateway that died are not cancelled.",
    ),
    Mutant(
        "nowhere held, nowhere lost",
        _STATE,
        "self._give_up_all(self._nowhere)",
        "list[Command]()",
        "A declared request that no member holds is placed as the same attempt.",
    ),
    Mutant(
        "first holder wins",
        _RECOVERY,
        "held is None or held.role is not Role.DECODE or (held.lends and member.role is Role.DECODE)",
        "held is None",
        "A new router takes the member that answered first for the one that has the request.",
    ),
    Mutant(
        "queue never shrinks",
        "router/placing/admission.py",
        "load.queue(len(request.prompt), -1)",
        "",
        "The tokens of prompts that have begun count as queued for ever, and requests are refused.",
    ),
)
