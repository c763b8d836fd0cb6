"""Mutants of the owner's core, of membership, and of the job runner with its store."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_OWNER, _MEMBERSHIP = "alignedserve/owner/core.py", "alignedserve/protocol/membership.py"
_JOBS, _LINES = "alignedserve/jobs/state.py", "alignedserve/jobs/window.py"
_RUNNER, _STORE = "alignedserve/jobs/actor.py", "alignedserve/store/sqlite_store.py"

OWNER = (
    Mutant(
        "older attempt accepted",
        _OWNER,
        "output.attempt < opened.request.attempt",
        "output.attempt < 0",
        "The owner delivers tokens of an attempt that was given up.",
    ),
    Mutant(
        "token repeated",
        _OWNER,
        "have - output.index",
        "have - output.index - 1",
        "Of tokens that are sent again, the client gets one twice.",
    ),
    Mutant(
        "gap accepted",
        _OWNER,
        "output.index > have",
        "output.index > have + 1",
        "A token that was lost on the way is left out.",
    ),
    Mutant(
        "doubt without end",
        _OWNER,
        "opened.has_doubted = True",
        "",
        "A request of which no token can be sampled is tried ten times.",
    ),
    Mutant(
        "any attempt counts as lost",
        _OWNER,
        "not is_current",
        "False",
        "The word that an older attempt is lost starts an attempt without cause.",
    ),
    Mutant(
        "no acknowledgement",
        _OWNER,
        "[Send(worker, Acknowledge((opened.request.id,))) for worker in sorted(opened.senders)]",
        "[]",
        "Workers keep outputs until they remind the owner of them.",
    ),
    Mutant(
        "fruitless attempts add up",
        _OWNER,
        "opened.missing_at, opened.num_fruitless = (None, 0)",
        "opened.missing_at = None",
        "A request with ten lost attempts in its life is given up, though each brought tokens.",
    ),
    Mutant(
        "last token emitted again",
        _OWNER,
        "tuple(self.output)",
        "tuple(self.output[:-1])",
        "The next attempt goes on one token too early.",
    ),
    Mutant(
        "silence not heard",
        _OWNER,
        "now - opened.heard_at >= SILENCE_S",
        "now - opened.heard_at >= 1000000000.0",
        "The owner never asks for a request of which it hears nothing.",
    ),
    Mutant(
        "cancel left out",
        _OWNER,
        "[Send(ROUTER, Cancel(request.id, request.attempt)), *self._settling.end(request.id, opened.account)]",
        "self._settling.end(request.id, opened.account)",
        "A request whose client has left runs to its end.",
    ),
)

MEMBERSHIP = (
    Mutant(
        "another incarnation admitted",
        _MEMBERSHIP,
        "member is not None and member.incarnation == event.incarnation",
        "member is not None",
        "A core hears a member's frame before it knows of that member's new life.",
    ),
    Mutant(
        "frames of an earlier life kept",
        _MEMBERSHIP,
        "[event for event in held if event.incarnation == member.incarnation]",
        "list(held)",
        "Frames that waited for the announcement of a dead life are heard as those of the next.",
    ),
    Mutant(
        "frame heard twice",
        _MEMBERSHIP,
        "number <= last",
        "number < last",
        "A frame that comes a second time is heard again.",
    ),
    Mutant(
        "gap not noticed",
        _MEMBERSHIP,
        "[received] if number == last + 1 else [LinkGap(sender), received]",
        "[received]",
        "No part hears that a frame was lost.",
    ),
    Mutant(
        "frames of a dead life heard",
        _MEMBERSHIP,
        "number <= last or incarnation < self._met.get(sender, 0)",
        "number <= last",
        "A late frame of a member's earlier life is heard.",
    ),
    Mutant(
        "role not asked",
        _MEMBERSHIP,
        "may_say(role, type(event.message)) and type(event.message) is not Heartbeat",
        "type(event.message) is not Heartbeat",
        "A worker retires another, and a pool names the members.",
    ),
    Mutant(
        "role not asked by the router",
        _MEMBERSHIP,
        "event.incarnation <= life.incarnation and may_say(life.role, type(event.message))",
        "event.incarnation <= life.incarnation",
        "A worker declares another dead.",
    ),
    Mutant(
        "life that was not started registers",
        _MEMBERSHIP,
        "named == life and event.incarnation == life.incarnation",
        "event.sender == member.name",
        "A process that nobody started takes a member's place with a large incarnation.",
    ),
    Mutant(
        "life that was not started dies",
        _MEMBERSHIP,
        "life is not None and incarnation <= life.incarnation",
        "life is not None",
        "A death with a large incarnation takes a member away for good.",
    ),
    Mutant(
        "anyone may be the launcher",
        _MEMBERSHIP,
        "(sender == LAUNCHER) is not is_launchers",
        "sender != LAUNCHER and is_launchers",
        "A part that calls itself the launcher declares deaths.",
    ),
    Mutant(
        "process that was cast out goes on",
        _MEMBERSHIP,
        "(member.name, member.incarnation) == (self._me, self._incarnation)",
        "member.name == self._me",
        "A frozen process goes on beside its next life.",
    ),
)

JOBS = (
    Mutant(
        "line tried once too often",
        _JOBS,
        "tries < self._retries",
        "tries <= self._retries",
        "A line that fails is tried more often than it may be.",
    ),
    Mutant(
        "line ends twice",
        _JOBS,
        "case LineEnded(id, line) if (opened := self._jobs.get(id)) and line in opened.running:\n"
        "    commands += self._end_line(opened, event, now)",
        "case LineEnded(id, line) if (opened := self._jobs.get(id)):\n"
        "    commands += self._end_line(opened, event, now)",
        "A line that was dropped ends, which breaks the runner.",
    ),
    Mutant(
        "stored line stays open",
        _JOBS,
        "opened.running.pop(line, None)",
        "",
        "A job never ends, since its lines stay open.",
    ),
    Mutant(
        "job ends before its lines",
        _JOBS,
        "opened.phase is not JobPhase.RUNNING or opened.num_left",
        "opened.phase is not JobPhase.RUNNING or opened.pending or opened.later",
        "A job is completed while lines have no result yet.",
    ),
    Mutant(
        "lines run on without the lease",
        _JOBS,
        "commands += [DropLines(id) for id in self._jobs]",
        "",
        "A runner that has lost its lease lets its lines run beside those of the next runner.",
    ),
    Mutant(
        "refused line forgotten",
        _JOBS,
        "opened.pending.append(ended.line)",
        "",
        "A line that the router refused is never run, and the job ends without its result.",
    ),
    Mutant(
        "window over, job goes on",
        _JOBS,
        "wall >= opened.job.expires_at",
        "wall >= 2 * opened.job.expires_at",
        "A job runs on when its window is over.",
    ),
    Mutant(
        "refusal forgotten at once",
        _LINES,
        "num_open / 2",
        "float(num_open)",
        "As many lines are open after a refusal as before.",
    ),
    Mutant(
        "line lost at the runner's next start",
        _RUNNER,
        "line.number not in done",
        "line.number > len(done)",
        "A runner that starts again takes the first lines for those that are done.",
    ),
    Mutant(
        "result written twice",
        _STORE,
        "'INSERT OR IGNORE INTO results (job, line, record) VALUES (?, ?, ?)'",
        "'INSERT OR REPLACE INTO results (job, line, record) VALUES (?, ?, ?)'",
        "A line counts twice whose result is written again, since the first answer of the store was lost.",
    ),
    Mutant(
        "lines of a cancelled job run on",
        _JOBS,
        "[DropLines(opened.job.id), end]",
        "[end]",
        "Requests of a job that was cancelled are left when it has ended.",
    ),
    Mutant(
        "job that ended unheard kept",
        _JOBS,
        "ended = [id for id, opened in self._jobs.items() if opened.phase is JobPhase.NEW and id not in open_ids]",
        "ended = list[str]()",
        "A runner that did not hear of a job's end keeps it.",
    ),
)
