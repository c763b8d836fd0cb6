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
        "if output.attempt < opened.request.attempt:",
        "if output.attempt < 0:",
        "The owner delivers tokens of an attempt that was given up.",
    ),
    Mutant(
        "token repeated",
        _OWNER,
        "known = have - output.index",
        "known = have - output.index - 1",
        "Of tokens that are sent again, the client gets one twice.",
    ),
    Mutant(
        "gap accepted",
        _OWNER,
        "if output.index > have:",
        "if output.index > have + 1:",
        "A token that was lost on the way is left out.",
    ),
    Mutant(
        "doubt without end",
        _OWNER,
        "        opened.has_doubted = True\n",
        "",
        "A request of which no token can be sampled is tried ten times.",
    ),
    Mutant(
        "any attempt counts as lost",
        _OWNER,
        "if not is_current:  # the worker was silent",
        "if False:  # the worker was silent",
        "The word that an older attempt is lost starts an attempt without cause.",
    ),
    Mutant(
        "no acknowledgement",
        _OWNER,
        "return [Send(worker, Acknowledge((opened.request.id,))) for worker in sorted(opened.senders)]",
        "return []",
        "Workers keep outputs until they remind the owner of them.",
    ),
    Mutant(
        "fruitless attempts add up",
        _OWNER,
        "opened.missing_at, opened.num_fruitless = None, 0",
        "opened.missing_at = None",
        "A request with ten lost attempts in its life is given up, though each brought tokens.",
    ),
    Mutant(
        "last token emitted again",
        _OWNER,
        "attempt, emitted = self.request.attempt + 1, tuple(self.output)",
        "attempt, emitted = self.request.attempt + 1, tuple(self.output[:-1])",
        "The next attempt goes on one token too early.",
    ),
    Mutant(
        "silence not heard",
        _OWNER,
        "if now - opened.heard_at >= SILENCE_S]",
        "if now - opened.heard_at >= 1e9]",
        "The owner never asks for a request of which it hears nothing.",
    ),
    Mutant(
        "cancel left out",
        _OWNER,
        "        return [Send(ROUTER, Cancel(opened.request.id, opened.request.attempt))]\n",
        "        return []\n",
        "A request whose client has left runs to its end.",
    ),
)

MEMBERSHIP = (
    Mutant(
        "another incarnation admitted",
        _MEMBERSHIP,
        "if member is not None and member.incarnation == event.incarnation:",
        "if member is not None:",
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
        "if number <= last or",
        "if number < last or",
        "A frame that comes a second time is heard again.",
    ),
    Mutant(
        "gap not noticed",
        _MEMBERSHIP,
        "return [received] if number == last + 1 else [LinkGap(sender), received]",
        "return [received]",
        "No part hears that a frame was lost.",
    ),
    Mutant(
        "frames of a dead life heard",
        _MEMBERSHIP,
        " or incarnation < self._met.get(sender, 0):",
        ":",
        "A late frame of a member's earlier life is heard.",
    ),
    Mutant(
        "role not asked",
        _MEMBERSHIP,
        "if may_say(role, type(event.message)) and",
        "if",
        "A worker retires another, and a pool names the members.",
    ),
    Mutant(
        "role not asked by the router",
        _MEMBERSHIP,
        "return event.incarnation <= life.incarnation and may_say(life.role, type(event.message))",
        "return event.incarnation <= life.incarnation",
        "A worker declares another dead.",
    ),
    Mutant(
        "life that was not started registers",
        _MEMBERSHIP,
        "return named == life and event.incarnation == life.incarnation",
        "return event.sender == member.name",
        "A process that nobody started takes a member's place with a large incarnation.",
    ),
    Mutant(
        "life that was not started dies",
        _MEMBERSHIP,
        "if life is not None and incarnation <= life.incarnation:",
        "if life is not None:",
        "A death with a large incarnation takes a member away for good.",
    ),
    Mutant(
        "anyone may be the launcher",
        _MEMBERSHIP,
        "if (sender == LAUNCHER) is not is_launchers:",
        "if sender != LAUNCHER and is_launchers:",
        "A part that calls itself the launcher declares deaths.",
    ),
    Mutant(
        "process that was cast out goes on",
        _MEMBERSHIP,
        "if not any((member.name, member.incarnation) == (self._me, self._incarnation) for member in members):",
        "if not any(member.name == self._me for member in members):",
        "A frozen process goes on beside its next life.",
    ),
)

JOBS = (
    Mutant(
        "line tried once too often",
        _JOBS,
        "tries < self._retries:",
        "tries <= self._retries:",
        "A line that fails is tried more often than it may be.",
    ),
    Mutant(
        "line ends twice",
        _JOBS,
        "case LineEnded(id, line) if (opened := self._jobs.get(id)) and line in opened.running:",
        "case LineEnded(id, line) if (opened := self._jobs.get(id)):",
        "A line that was dropped ends, which breaks the runner.",
    ),
    Mutant(
        "stored line stays open",
        _JOBS,
        "                    opened.running.pop(line, None)\n",
        "                    pass\n",
        "A job never ends, since its lines stay open.",
    ),
    Mutant(
        "job ends before its lines",
        _JOBS,
        "if opened.phase is not Phase.RUNNING or opened.num_left:",
        "if opened.phase is not Phase.RUNNING or opened.pending or opened.later:",
        "A job is completed while lines have no result yet.",
    ),
    Mutant(
        "lines run on without the lease",
        _JOBS,
        "commands += [DropLines(id) for id in self._jobs]",
        "pass",
        "A runner that has lost its lease lets its lines run beside those of the next runner.",
    ),
    Mutant(
        "refused line forgotten",
        _JOBS,
        "            opened.pending.append(ended.line)\n            return []",
        "            return []",
        "A line that the router refused is never run, and the job ends without its result.",
    ),
    Mutant(
        "window over, job goes on",
        _JOBS,
        "if opened.phase is Phase.RUNNING and wall >= opened.job.expires_at",
        "if opened.phase is Phase.RUNNING and wall >= 2 * opened.job.expires_at",
        "A job runs on when its window is over.",
    ),
    Mutant(
        "refusal forgotten at once",
        _LINES,
        "self._ceiling = max(1.0, min(self._ceiling, num_open / 2))",
        "self._ceiling = max(1.0, min(self._ceiling, float(num_open)))",
        "As many lines are open after a refusal as before.",
    ),
    Mutant(
        "line lost at the runner's next start",
        _RUNNER,
        "if line.number not in done)",
        "if line.number > len(done))",
        "A runner that starts again takes the first lines for those that are done.",
    ),
    Mutant(
        "result written twice",
        _STORE,
        "INSERT OR IGNORE INTO results",
        "INSERT OR REPLACE INTO results",
        "A line counts twice whose result is written again, since the first answer of the store was lost.",
    ),
    Mutant(
        "lines of a cancelled job run on",
        _JOBS,
        "return [DropLines(opened.job.id), AssembleJob(opened.job, status)]",
        "return [AssembleJob(opened.job, status)]",
        "Requests of a job that was cancelled are left when it has ended.",
    ),
    Mutant(
        "job that ended unheard kept",
        _JOBS,
        "        commands = self._forget_ended({job.id for job in jobs})\n",
        "        commands: list[JobCommand] = []\n",
        "A runner that did not hear of a job's end keeps it.",
    ),
)
