"""Read what clients saw of a deployment, and report what an honest service never shows.

    python -m tests.chaos.oracle HISTORY...    anomalies with the lines that show them; exit code 1 where there are any

A history has an event on each line, a JSON object, written as it happens. `at` is its time on the steady clock of the
clients' machine, `is` its kind, and `id` the number of the call that it belongs to. The kinds, and their other fields:

    call   a client asks: key, method, path; for tokens: question (it has one right answer), max_tokens, ignore_eos,
           stream; of a file: sha256, lines (the question of each line of a batch); for a batch: input (its file)
    head   the answer begins: status, retry_after
    piece  a piece of the answer: text, tokens, finish
    line   a line of a batch's output or errors: custom_id, and text, tokens, finish or code
    end    nothing more comes: how (done, broken, away, late), done ([DONE] was read), code and well_formed (of an
           error), prompt_tokens, completion_tokens, thing (what was made and is kept), sha256 (of what was made or
           read), things (what was listed), state, counts (total, completed, failed), output and errors (files)
    hurt   a part, a disk, a clock or a wire was hurt; calm: what was hurt before is in order again
    right  a question has this right answer too: a near tie, which somebody else has judged
    limit  what a key may have: requests_per_minute, tokens_per_minute

Other fields are texts, and for people: model, promise, sampling.

A judge is no party: this file needs the standard library alone, and shares no code with what it judges.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product, takewhile
from pathlib import Path
from typing import Any, NamedTuple

BOUND_S, BATCH_S = 300.0, 600.0  # for a call to end; for a batch, after the last fault
AROUND_S = 5.0  # between a fault and the note of it, at most
BACK_S = 60.0  # after a fault, clients may find no gateway or be refused for so long, and all of them at once too
REFUSED_SHARE = 0.5  # of a history, in which all may be refused
BLAMED = {"request_ends_workers": ("prefill", "decode"), "job_runner_died": ("jobs",)}  # code -> the parts that ended
FORGETS = "redis forgets"  # a hurt: what was acknowledged before may be gone, and what was deleted be there again
BLAMING_HURTS = 3  # of such parts while a request ran, before it is blamed
STATES, ENDED = {"validating": 0, "in_progress": 1, "finalizing": 2, "cancelling": 2}, 3  # of batches

NUMBERS = ["at", "id", "size", "status", "retry_after", "requests_per_minute", "tokens_per_minute"]
NUMBERS += ["max_tokens", "prompt_tokens", "completion_tokens"]
LISTS: dict[str, type] = {"tokens": int, "counts": int, "lines": str, "things": str}
FLAGS = ("stream", "ignore_eos", "done", "well_formed")
NEEDED = {"call": "id key method path", "head": "id status", "piece": "id", "line": "id custom_id", "end": "id how"}
NEEDED |= {"hurt": "part", "calm": "", "right": "question", "limit": "key"}
Event = dict[str, Any]


class Anomaly(NamedTuple):
    kind: str
    said: str
    lines: Sequence[int]  # of the history, from 1

    def __str__(self) -> str:
        return f"{self.kind}: {self.said} (lines {', '.join(map(str, sorted(set(self.lines))))})"


@dataclass
class Answer:
    """What was answered to a question, or the beginning of it."""

    question: str
    lines: list[int]
    is_whole: bool = True
    text: str = ""
    tokens: list[int] = field(default_factory=list)  # none, where their client did not ask for them
    finish: str = ""

    def add(self, event: Event, line: int) -> None:
        self.lines = [self.lines[0] if self.lines else line, line]
        self.text += event.get("text", "")
        self.tokens += event.get("tokens", ())
        self.finish = event.get("finish", "") or self.finish

    def agrees(self, right: Answer) -> bool:
        tokens, others = (self.tokens, right.tokens) if self.tokens and right.tokens else ([], [])
        if self.is_whole and right.is_whole:
            return (self.text, tokens, self.finish) == (right.text, others, right.finish)
        return right.text.startswith(self.text) and others[: len(tokens)] == tokens


@dataclass
class Call:
    asked: Event
    line: int
    head: Event = field(default_factory=dict)
    end: Event = field(default_factory=dict)
    pieces: list[tuple[Event, int]] = field(default_factory=list)  # with their lines in the history
    rows: list[tuple[Event, int]] = field(default_factory=list)  # of a batch's file

    def __post_init__(self) -> None:
        self.at, self.key, self.last_line = float(self.asked["at"]), self.asked["key"], self.line
        parts = [*self.asked["path"].partition("?")[0].strip("/").split("/"), "", "", ""]
        self.id = parts[2]  # in the path
        self.route = " ".join(filter(None, (self.asked["method"], parts[1], self.id and "ID", parts[3])))

    @property
    def lines(self) -> list[int]:
        return [self.line, self.last_line]

    @property
    def ended_at(self) -> float:
        return float(self.end.get("at", math.inf))

    @property
    def status(self) -> int:
        return int(self.head.get("status", 0))

    @property
    def max_tokens(self) -> float:
        return float(self.asked.get("max_tokens", math.inf))

    @property
    def tokens(self) -> float:
        return float(self.end.get("prompt_tokens", 0) + self.end.get("completion_tokens", 0))

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.end.get("how") == "done" and "code" not in self.end

    @property
    def files(self) -> list[str]:
        return [name for name in ("output", "errors") if name in self.end]

    @property
    def outcome(self) -> str:
        code, how = self.end.get("code"), self.end.get("how", "open")
        failed = "blamed" if code in BLAMED else "refused" if self.status in (429, 503) else "failed"
        return "answered" if self.is_good else failed if how == "done" else how

    @property
    def answer(self) -> Answer:
        made = Answer(self.asked.get("question", ""), [self.line], self.is_good)
        for piece in self.pieces:
            made.add(*piece)
        return made


@dataclass
class Batch:
    made: Call
    questions: list[str]  # of its lines
    polls: list[Call]
    files: list[Call]  # the first reads of its output and of its errors

    @property
    def answers(self) -> Iterator[Answer]:
        by_id = {str(number): question for number, question in enumerate(self.questions)}
        for row, line in (row for file in self.files for row in file.rows):
            if "code" not in row and row["custom_id"] in by_id:
                (answer := Answer(by_id[row["custom_id"]], [self.made.line])).add(row, line)
                yield answer


class History:
    """All that clients saw. The last line may be cut off, since the clients were."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.marks: defaultdict[str, list[tuple[Event, int]]] = defaultdict(list)  # events that belong to no call
        self.unreadable: list[int] = []
        self.ended_at, number, by_id = 0.0, 0, dict[float, Call]()
        for number, line in enumerate(lines, start=1):
            if (event := _event(line)) is None or not self._take(event, number, by_id):
                self.unreadable.append(number)
        self.unreadable = [line for line in self.unreadable if line < number]
        self.calls = list(by_id.values())
        self.batches = list(self._find_batches([call for call in self.calls if call.is_good]))
        self.limited = {limit["key"] for limit, _ in self.marks["limit"]}

    def _take(self, event: Event, number: int, calls: dict[float, Call]) -> bool:
        """Add an event; return whether it has its place here."""
        kind, id = event["is"], event.get("id")
        self.ended_at = max(self.ended_at, event["at"])
        if id is None:
            self.marks[kind].append((event, number))
        elif kind == "call" and id not in calls:
            calls[id] = Call(event, number)
        elif kind == "call" or id not in calls or calls[id].end:
            return False
        else:
            (call := calls[id]).last_line = number
            if kind in ("piece", "line"):
                (call.pieces if kind == "piece" else call.rows).append((event, number))
            else:
                setattr(call, kind, event)
        return True

    @staticmethod
    def _find_batches(good: Sequence[Call]) -> Iterator[Batch]:
        uploads = {call.end.get("thing"): call.asked.get("lines", []) for call in good if call.route == "POST files"}
        reads = {call.id: call for call in reversed(good) if call.route == "GET files ID content"}
        for made in (call for call in good if call.route == "POST batches"):
            polls = [call for call in good if call.route == "GET batches ID" and call.id == made.end.get("thing")]
            polls = [call for call in polls if call.end.keys() >= {"state", "counts"}]
            files = [reads[poll.end[name]] for poll in polls[-1:] for name in poll.files if poll.end[name] in reads]
            yield Batch(made, uploads.get(made.asked.get("input"), []), polls, files)

    def hurts(self, parts: Sequence[str], began: float, until: float, before_s: float = 0.0) -> int:
        """Return how often these parts, or any without names, were hurt in a time, or shortly before it and since then
        not in order again."""
        since = max([began - before_s, *(calm["at"] for calm, _ in self.marks["calm"] if calm["at"] <= began)])
        found = (hurt["part"] for hurt, _ in self.marks["hurt"] if since <= hurt["at"] <= until)
        return sum(not parts or part.startswith(tuple(parts)) for part in found)

    def forgot(self, since: float, until: float) -> bool:
        """Return whether the store may have forgotten in this time what was acknowledged before it, or just then."""
        return any(hurt["part"] == FORGETS and since <= hurt["at"] <= until for hurt, _ in self.marks["hurt"])


def _event(line: str) -> Event | None:
    """Return the event of a line, or None where it is none: each field that a rule reads has its type."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not all(_fits(*item) for item in event.items()):
        return None
    needed = NEEDED.get(event.get("is", ""))
    has_id = needed is not None and ("id" in event) == needed.startswith("id")
    return event if needed is not None and has_id and event.keys() >= {"at", *needed.split()} else None


def _fits(name: str, value: Any) -> bool:
    if name in NUMBERS:
        return isinstance(value, int | float) and abs(value) < 1e15
    if name in LISTS:
        is_list = isinstance(value, list) and all(isinstance(each, LISTS[name]) for each in value)
        return is_list and (name != "counts" or len(value) == 3)
    return isinstance(value, bool if name in FLAGS else str)


def other_answers(history: History) -> Iterator[tuple[Answer, Answer]]:
    """Yield the first answer to a question and one that is not the same, or not its beginning where it broke off."""
    given = [call.answer for call in history.calls if call.status == 200]
    given += [answer for batch in history.batches for answer in batch.answers]
    given = [answer for answer in given if answer.question]
    broken = sorted((answer for answer in given if not answer.is_whole), key=lambda answer: -len(answer.text))
    right: defaultdict[str, list[Answer]] = defaultdict(list)
    for tie, line in history.marks["right"]:
        right[tie["question"]].append(Answer(tie["question"], []))
        right[tie["question"]][-1].add(tie, line)
    first: dict[str, Answer] = {}
    for answer in (*(answer for answer in given if answer.is_whole), *broken):
        known = first.setdefault(answer.question, answer)
        if not any(answer.agrees(other) for other in (known, *right[answer.question])):
            yield known, answer


def _answers(history: History) -> Iterator[Anomaly]:
    """A question has one answer; what broke off is its beginning, without a gap and without a piece twice."""
    for first, answer in other_answers(history):
        same = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(first.text, answer.text, strict=False)))
        said = f"after {same} characters {first.text[same:][:40]!r} or {answer.text[same:][:40]!r}"
        yield Anomaly("another answer", f"to {answer.question}: {said}", [*first.lines, *answer.lines])


def _ends(history: History) -> Iterator[Anomaly]:
    """Each call ends in time: by [DONE], by an error, or by a broken connection while the gateway was hurt."""
    for call in history.calls:
        how, until = call.end.get("how"), min(call.ended_at, history.ended_at)
        before_s = {"away": BACK_S, "broken": AROUND_S}.get(how or "")
        if how == "late" or until - call.at > BOUND_S:
            yield Anomaly("no end", f"{call.route}, within {BOUND_S:.0f} s", call.lines)
        elif before_s and not history.hurts(("gateway",), call.at, until + AROUND_S, before_s):
            yield Anomaly("broken connection", f"{call.route}, and no gateway was hurt", call.lines)
        elif how == "done" and call.status == 200 and call.asked.get("stream") and not call.end.get("done"):
            yield Anomaly("no [DONE]", call.route, call.lines)


def _shapes(history: History) -> Iterator[Anomaly]:
    """An answer has tokens, and one finish at its end; its usage counts what it has."""
    prompts: dict[str, float] = {}
    for call in (call for call in history.calls if call.is_good and call.asked.get("question")):
        answer, most, prompt = call.answer, call.max_tokens, call.end.get("prompt_tokens", 0)
        used = call.end.get("completion_tokens", len(answer.tokens))
        last = next((number for number, (piece, _) in enumerate(call.pieces, start=1) if piece.get("finish")), 0)
        if not used and not answer.text:
            yield Anomaly("empty answer", "neither tokens nor an error", call.lines)
        is_other = prompts.setdefault(answer.question, prompt) != prompt
        if is_other or used > most or used != (len(answer.tokens) or used):
            said = f"{used} of {most} for {len(answer.tokens)} tokens, and {prompt} of the prompt"
            yield Anomaly("wrong usage", said, call.lines)
        is_early = (
            used != most if answer.finish == "length" else answer.finish != "stop" or call.asked.get("ignore_eos")
        )
        if is_early or not last or any(piece.keys() & {"text", "tokens", "finish"} for piece, _ in call.pieces[last:]):
            said = f"{answer.finish!r} with piece {last} of {len(call.pieces)}, after {used} of {most} tokens"
            yield Anomaly("wrong finish", said, call.lines)


def _errors(history: History) -> Iterator[Anomaly]:
    """Errors have the interface's form and an excuse; refusals say when to come again."""
    for call in history.calls:
        code, status = call.end.get("code", ""), call.status
        if call.end.get("how") != "done" or not (code or status >= 400):
            continue
        said, is_refusal = f"{call.route}: {status} {code}", status in (429, 503)
        if not call.end.get("well_formed"):
            yield Anomaly("malformed error", said, call.lines)
        if is_refusal and not call.head.get("retry_after"):
            yield Anomaly("no Retry-After", said, call.lines)
        is_read = call.asked["method"] != "POST"  # _kept judges what is not there
        is_excused = status == 404 and (is_read or history.forgot(0.0, call.ended_at))
        if code in BLAMED:
            is_excused = history.hurts(BLAMED[code], call.at, call.ended_at) >= BLAMING_HURTS
        elif is_refusal or status == 507:
            parts = () if is_refusal else ("full",)
            is_limited = status == 429 and call.key in history.limited
            is_excused = is_limited or history.hurts(parts, call.at, call.ended_at + AROUND_S, BACK_S) > 0
        if not is_excused:
            yield Anomaly("refused" if is_refusal else "error", f"{said}, and nothing excuses it", call.lines)


def _refusals(history: History) -> Iterator[Anomaly]:
    """All that clients ask is refused for a minute at most, and for half of the time."""
    asked = [call for call in history.calls if call.answer.question and call.key not in history.limited]
    told = sorted((call for call in asked if call.pieces or call.outcome == "refused"), key=lambda call: call.ended_at)
    first, refused_s = None, 0.0
    for before, call in pairwise(told):
        if {before.outcome, call.outcome} != {"refused"}:
            first = None
            continue
        first = first or before
        refused_s += call.ended_at - before.ended_at
        if call.ended_at - first.ended_at > BACK_S or refused_s > REFUSED_SHARE * (history.ended_at - asked[0].at):
            yield Anomaly("all refused", f"for {refused_s:.0f} s in all", [*first.lines, *call.lines])
            return


def _kept(history: History) -> Iterator[Anomaly]:
    """What was acknowledged is there unchanged until it is deleted, and then never again."""
    made = {call.end["thing"]: call for call in history.calls if call.asked["method"] == "POST" and "thing" in call.end}
    made |= {poll.end[name]: poll for batch in history.batches for poll in batch.polls for name in poll.files}
    hashes = {id: call.asked.get("sha256") or call.end.get("sha256") for id, call in made.items()}
    deletes = [call for call in history.calls if call.asked["method"] == "DELETE"]
    for call in (call for call in history.calls if call.asked["method"] in ("GET", "DELETE")):
        ended = [each for each in deletes if each.is_good and each.ended_at <= call.at]
        gone = {each.id: each for each in ended if not history.forgot(each.at, call.ended_at)}
        there = {id for id, each in made.items() if each.ended_at <= call.at and each.key == call.key}
        there = {id for id in there if not history.forgot(made[id].at, call.ended_at)}
        there -= {each.id for each in deletes if each.at <= call.ended_at and each is not call}
        listed, files = call.end.get("things"), {id for id in there if made[id].route == "POST files"}
        lost = {call.id} & there if call.status == 404 else set() if listed is None else files - set(listed)
        for id in sorted(lost):
            yield Anomaly("lost", f"{call.route}: {id}, which is not deleted", [*made[id].lines, *call.lines])
        for id in sorted(gone.keys() & {*(listed or ()), call.id} if call.status == 200 else ()):
            yield Anomaly("deleted, and back", f"{call.route}: {id}", [*gone[id].lines, *call.lines])
        sha256 = call.end.get("sha256") if call.is_good else None
        if sha256 and sha256 != (hashes.setdefault(call.id, sha256) or sha256):
            yield Anomaly("changed", f"{call.route}: {call.id} has other bytes than before", call.lines)


def _jobs(history: History) -> Iterator[Anomaly]:
    """A batch goes forward and completes; each of its lines is answered once."""
    hurt_at = max([0.0, *(hurt["at"] for hurt, _ in history.marks["hurt"])])
    for batch in (batch for batch in history.batches if batch.polls):
        for before, poll in pairwise(batch.polls):
            (was, counted), (now, counts) = ((each.end["state"], each.end["counts"]) for each in (before, poll))
            is_other = STATES.get(now, ENDED) < STATES.get(was, ENDED) or (was not in STATES and now != was)
            is_back = is_other or any(map(int.__gt__, counted, counts))
            if before.ended_at <= poll.at and is_back and not history.forgot(before.at, poll.ended_at):
                said = f"from {was} {counted} to {now} {counts}"
                yield Anomaly("batch went back", said, [*before.lines, *poll.lines])
        made, last = batch.made, batch.polls[-1]
        state, lines = last.end["state"], [*made.lines, *last.lines]
        is_late = last.at - max(hurt_at, made.at) > BATCH_S
        is_gone = history.forgot(made.at, history.ended_at)
        if state != "completed" and (is_late or state not in STATES) and not is_gone:
            yield Anomaly("batch not completed", f"{state} {last.end['counts']}", lines)
        if state != "completed" or len(batch.files) < len(last.files):
            continue
        rows = [row for file in batch.files for row, _ in file.rows]
        failed = [row["code"] for row in rows if "code" in row]
        ids = sorted(row["custom_id"] for row in rows)
        counts = [len(batch.questions), len(rows) - len(failed), len(failed)]
        if ids != sorted(map(str, range(len(batch.questions)))) or counts != last.end["counts"]:
            said = f"{last.end['counts']} of {len(batch.questions)}, and in its files {', '.join(ids)}"
            yield Anomaly("batch lines", said, [*lines, *(line for file in batch.files for line in file.lines)])
        for code in failed:
            if history.hurts(BLAMED.get(code, ("no part",)), made.at, last.ended_at) < BLAMING_HURTS:
                yield Anomaly("error", f"{code} for a line of a batch, and nothing excuses it", lines)


def _limits(history: History) -> Iterator[Anomaly]:
    """In any time a key gets a minute's worth, and what has filled up since, of requests for tokens and of tokens.

    A server counts at some time between call and head, so those count that lie within. Tokens that calls before had
    taken ahead and not used may have come back meanwhile."""
    for limit, _ in history.marks["limit"]:
        calls = [call for call in history.calls if call.key == limit["key"] and 0 < call.status < 400]
        calls.sort(key=lambda call: call.head["at"])
        for first, what in product(calls, ("requests", "tokens")):
            open_then = [call for call in calls if call.at < first.at < call.ended_at and what == "tokens"]
            worth, back = limit.get(f"{what}_per_minute", math.inf), sum(call.max_tokens for call in open_then)
            taken = 0.0
            for call in (call for call in calls if call.at >= first.at):
                taken += call.tokens if what == "tokens" else "question" in call.asked
                most = worth * (1 + (call.head["at"] - first.at) / 60) + back
                if taken > most:
                    said = f"{limit['key']} had {taken:.0f} {what}, and {most:.1f} at most"
                    yield Anomaly("over the limit", said, [*first.lines, *call.lines])
                    return


def anomalies(history: History) -> list[Anomaly]:
    rules = (_answers, _ends, _shapes, _errors, _refusals, _kept, _jobs, _limits)
    unreadable = [Anomaly("unreadable", "a line of the history", [line]) for line in history.unreadable]
    return [*unreadable, *(anomaly for rule in rules for anomaly in rule(history))]


def read(path: Path) -> History:
    with path.open(encoding="utf-8", errors="replace") as file:
        return History(file)


def main(paths: Sequence[str]) -> bool:
    """Print the anomalies of each history; return whether there are any."""
    is_any = False
    for path in paths:
        history = read(Path(path))
        told, ends = anomalies(history), Counter(call.outcome for call in history.calls)
        for anomaly in told:
            print(f"{path}: {anomaly}")
        said = ", ".join(f"{number} {how}" for how, number in ends.most_common())
        print(f"{path}: {len(told) or 'no'} anomalies in {len(history.calls)} requests: {said}")
        is_any |= bool(told)
    return is_any


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
