"""Measure the router's core on one CPU core: requests admitted and placed per second, by the number of workers.

    python -m lab.benchmarks.router [--requests 20000] [--workers 8,64,256,1024]

Half of the workers run prompts, half decode. Each request is submitted with a sketch of its prompt and placed; the
prefill worker, the pool and the decode worker report on it, and it ends. Decode workers report after every few
requests. The time is the processor time of the router's core; a decision lasts from Submit to Prefill. Requests come
and go, with 4 open for each worker. The predictor is `hash`: its side process runs on another CPU core, and is not
timed.

First a worker's frame for the gateway is written and read, with 64 outputs of a token each; the least time counts. The
baseline is what the same checks in Python took, on a quiet Zen 4 (alignedserve/protocol/wire.py). Then frames go over
loopback in bursts, by processor time of sender, receiver and ZeroMQ's threads; the baseline has no keys.
"""

from __future__ import annotations

import sys
from collections import deque
from contextlib import ExitStack
from random import Random
from time import process_time, thread_time

import zmq

from alignedserve.core import Request, Role, ServiceClass
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.requests import request
from alignedserve.lab.benchmarks.common.timing import least_us
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, Received, TimerFired
from alignedserve.protocol.messages import (
    ROUTER,
    Backlog,
    Heartbeat,
    Member,
    Message,
    Output,
    Prefill,
    Progress,
    Report,
    Submit,
    Tokens,
)
from alignedserve.protocol.wire import MOST_FRAME_BYTES, Envelope, decode, encode
from alignedserve.router.state import RouterCore, RouterLimits
from alignedserve.scheduling.sketch import sketch_of
from alignedserve.scheduling.slo import StepTimes
from alignedserve.shell.link_keys import DeploymentKeys, LinkKeys

_OPEN = 4  # open requests for each worker
_REPORTS = 4  # requests that a decode worker gets between two reports
_GOAL, _DECISION_US = 7500, 60  # whole lives in a second, and the median decision, with 64 workers
_FRAMES, _ROUNDS = 200, 20  # frames in a round, of which the fastest counts
_BURST = 500  # frames between two looks at the clock
_ENCODE_US, _DECODE_US = (83, 3), (139, 8)  # baseline and goal


def member(name: str, role: Role) -> Member:
    return Member(name, role, "local", 1, name)


class Deployment:
    def __init__(self, num_workers: int) -> None:
        self._now, self.seconds = 0.0, 0.0  # processor time of the router's core
        limits = RouterLimits(1 << 30, heartbeat_s=0.5, death_s=1e9, kv_tokens=1 << 30)
        self._router = RouterCore(member(ROUTER, Role.ROUTER), limits, 0.0)
        half = num_workers // 2
        self._decode = [f"decode-{number}" for number in range(half)]
        members = [member("gateway-0", Role.GATEWAY), member("pool-0", Role.POOL)]
        members += [member(f"prefill-{number}", Role.PREFILL) for number in range(half)]
        members += [member(name, Role.DECODE) for name in self._decode]
        for part in members:
            self.receive(part.name, Heartbeat(part))
        for timer in ("gathered", "recovered"):
            self._handle(TimerFired(timer))
        self._draw, self._num_reported = Random(0), 0
        for name in self._decode:
            self._report(name)
        self.seconds = 0.0

    def receive(self, sender: str, message: Message) -> list[Command]:
        return self._handle(Received(sender, message, 1))

    def _handle(self, event: Event) -> list[Command]:
        self._now += 1e-5
        began_at = thread_time()
        commands = self._router.handle(event, self._now)
        self.seconds += thread_time() - began_at
        return commands

    def begin(self, submit: Submit) -> tuple[str, str, float]:
        """Submit a request, and return its prefill worker, its decode worker and the seconds of the decision."""
        before = self.seconds
        commands = self.receive("gateway-0", submit)
        [(to, decode)] = [
            (command.to, command.message.decode)
            for command in commands
            if isinstance(command, Send) and isinstance(command.message, Prefill)
        ]
        return to, decode, self.seconds - before

    def end(self, request: Request, prefill: str, decode: str) -> None:
        """Report to the router that the prompt has run, and that the request has decoded and ended."""
        key = (request.id, 0)
        backlog = Backlog(self._draw.random(), 1e-4, self._draw.random() / 2)
        self.receive(prefill, Progress(backlog=backlog))
        self.receive("pool-0", Progress(committed=(key,)))
        self.receive(decode, Progress(joined=(key,), free_pairs=1000))
        self.receive(decode, Progress(ended=(key,), lengths=(20,), free_pairs=1000))
        if self._draw.random() < 1 / _REPORTS:
            self._report(decode)

    def _report(self, worker: str) -> None:
        shortest = self._draw.randrange(10, 2000)
        band = (shortest, shortest + self._draw.randrange(200))
        self.receive(worker, Report(16, band, self._draw.randrange(500, 1000), 64, StepTimes(0.02, 0.03)))


def submits(count: int) -> list[Submit]:
    draw = Random(1)
    made = []
    for number in range(count):
        prompt = tuple(draw.randrange(1, 30_000) for _ in range(draw.randrange(50, 400)))
        is_rt = draw.random() < 0.5
        service = ServiceClass.RT if is_rt else ServiceClass.BE
        asked = request(f"request-{number}", prompt, 256, stop_tokens=(2,), service=service)
        made.append(Submit(asked, sketch_of(prompt)))
    return made


def measure(num_workers: int, count: int) -> tuple[float, list[float]]:
    """Return the requests per second of the core's time, and the seconds of each decision."""
    deployment, asked, took = Deployment(num_workers), submits(count), list[float]()
    there: deque[tuple[Request, str, str]] = deque()
    for submit in asked:
        prefill, decode, seconds = deployment.begin(submit)
        took.append(seconds)
        there.append((submit.request, prefill, decode))
        if len(there) > _OPEN * num_workers:
            deployment.end(*there.popleft())
    while there:
        deployment.end(*there.popleft())
    return count / deployment.seconds, sorted(took)


def _frame_of(num_outputs: int) -> Envelope:
    outputs = (Output(f"cmpl-{number:032x}", 0, 17, (1000 + number,), None) for number in range(num_outputs))
    return Envelope("decode-0", 1, 1, Tokens(tuple(outputs)))


def report_frames() -> None:
    envelope = _frame_of(64)
    frame = encode(envelope)
    for way, work, (baseline, goal) in (
        ("encode", lambda: encode(envelope), _ENCODE_US),
        ("decode", lambda: decode(frame, MOST_FRAME_BYTES), _DECODE_US),
    ):
        value = least_us(work, _FRAMES, _ROUNDS)
        report(f"a frame of 64 outputs, {way}", value, "us", baseline=baseline, goal=goal)


def report_links() -> None:
    for num_outputs in (1, 64):
        frame, keys = encode(_frame_of(num_outputs)), DeploymentKeys.new().parts
        plain = _link_us(frame, None)
        report(f"a frame of {num_outputs} outputs over loopback", _link_us(frame, keys), "us", baseline=plain)


def _link_us(frame: bytes, keys: LinkKeys | None) -> float:
    """Return the microseconds of processor time that a frame takes from one socket to another."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox, link = context.socket(zmq.PULL), context.socket(zmq.PUSH)

    def burst() -> float:
        began_at = process_time()
        for _ in range(_BURST):
            link.send(frame)
        for _ in range(_BURST):
            inbox.recv()
        return 1e6 * (process_time() - began_at) / _BURST

    with ExitStack() as admission:
        if keys is not None:
            admission.enter_context(keys.admission(context, hears_launcher=False))
            keys.guard(inbox)
            keys.show(link)
        inbox.bind("tcp://127.0.0.1:*")
        link.connect(inbox.getsockopt_string(zmq.LAST_ENDPOINT))
        burst()
        took = min(burst() for _ in range(_ROUNDS))
        for socket in (link, inbox):
            socket.close(linger=0)
    context.term()
    return took


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="default: %(default)s")
    parser.add_argument("--workers", type=several(int), default=[8, 64, 256, 1024], help="default: %(default)s")
    args = parser.parse_args()
    report_frames()
    report_links()
    for num_workers in args.workers:
        rate, took = measure(num_workers, args.requests)
        goal = _GOAL if num_workers == 64 else None
        report(f"router, {num_workers} workers: whole lives", rate, "requests/s", goal=goal, at_least=True)
        for percent in (50, 99):
            at = 1e6 * took[len(took) * percent // 100]
            goal = _DECISION_US if (num_workers, percent) == (64, 50) else None
            report(f"router, {num_workers} workers: decision p{percent}", at, "us", goal=goal)
    sys.exit(status())


if __name__ == "__main__":
    main()
