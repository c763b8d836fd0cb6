"""The hot paths. Each returns the lines that one of its kind takes, as a mean of several."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.core import Request, ServiceClass, Slo, StepResult, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.machines.clock import Priority
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.trials.building import settings_of
from alignedserve.owner.core import OwnerCore
from alignedserve.protocol.commands import Command, RunStep
from alignedserve.protocol.events import Opened, Received, StepDone
from alignedserve.protocol.messages import ROUTER, Output, Prefill, Tokens
from alignedserve.protocol.wire import MOST_FRAME_BYTES, Envelope, decode, encode
from alignedserve.scheduling.policy import Policy
from alignedserve.text.text_model import TextModel
from alignedserve.worker.setup import WorkerSetup
from tests.gateway.conftest import FakeOwner, Gateway
from tests.ratchets.choices import choose, drawn
from tests.ratchets.counting import Lines
from tests.ratchets.lives import Deployment, submits
from tests.ratchets.requests import request

_TOKENS = 32  # of a stream, and of a frame


def _router(num_workers: int, is_life: bool = False, beginning: tuple[int, ...] = ()) -> float:
    """Return the lines of a decision, from Submit to Prefill, or of a request's whole life."""
    deployment, open_at_once, number = Deployment(num_workers), 4 * num_workers, 100
    decisions, ends = Lines(), Lines()
    there = deque[tuple[Request, str, str]]()
    for submit in submits(open_at_once + number):
        if beginning:
            submit = replace(submit, request=replace(submit.request, prompt=beginning + submit.request.prompt))
        if len(there) < open_at_once:
            there.append((submit.request, *deployment.begin(submit)))
            continue
        with decisions:
            prefill, decode = deployment.begin(submit)
        there.append((submit.request, prefill, decode))
        with ends:
            deployment.end(*there.popleft())
    return (decisions.number + (ends.number if is_life else 0)) / number


def _decode_step(num_running: int) -> float:
    """Return the lines from a step's end to the next step, on a decode worker that requests neither join nor leave."""
    limits = WorkerLimits(32_768, 16, 256, 2048, max_batch=num_running)
    core, lines, now, steps, ordered = decode_core(WorkerSetup(limits, Policy())), Lines(), 0.0, 0, list[Command]()
    for asked in islice(drawn(seed=1), num_running):
        slo = Slo(ttft_s=1e6, tbt_s=1e6) if asked.service is ServiceClass.RT else asked.slo
        prompt = replace(asked, slo=slo, prompt=asked.prompt[:64])
        ordered += core.handle(Received(ROUTER, Prefill(prompt)), now)
    while steps < 4:
        (plan,) = (order.plan for order in ordered if isinstance(order, RunStep))
        now += 0.03
        parts = (*plan.parts, *plan.draws)
        done = StepDone(StepResult(plan.number, tuple((part.request, 7) for part in parts if part.sampling)), 0.0)
        if len(plan.decodes) < num_running:
            ordered = core.handle(done, now)
            continue
        with lines:
            ordered = core.handle(done, now)
        steps += 1
    return lines.number / steps


def _prompt_step(num_waiting: int) -> float:
    """Return the lines of a choice among prompts that wait, beside 32 decodes: what more choices take than fewer."""

    def lines_of(steps: int) -> int:
        with Lines() as lines:
            choose(Policy(), num_waiting, 32, steps)
        return lines.number

    few, many = 2, 6
    return (lines_of(many) - lines_of(few)) / (many - few)


def _token_in_owner() -> float:
    """Return the lines of a token, of a frame with 32, from the frame to its delivery."""
    core, steps, lines = OwnerCore(frozenset()), 4, Lines()
    asked = [request(f"request-{number}", (1, 2, 3), 100) for number in range(_TOKENS)]
    for each in asked:
        core.handle(Opened(each, None), 0.0)
    for step in range(steps):
        outputs = tuple(Output(each.id, 0, step, (7,), None) for each in asked)
        with lines:
            core.handle(Received("decode-0", Tokens(outputs)), 1.0 + step)
    return lines.number / (steps * _TOKENS)


def _token_in_gateway() -> float:
    """Return the lines of a token from its delivery to the bytes of its event: what a longer stream takes more than a
    shorter one."""
    text = TextModel.load(DEMO_FOLDER)

    def lines_of(num_tokens: int) -> int:
        gateway = Gateway(text, FakeOwner(*((300 + number,) for number in range(num_tokens))))
        with Lines() as lines:
            assert gateway.chat(stream=True, max_tokens=num_tokens).text.count("data: ") >= num_tokens
        return lines.number

    return (lines_of(4 + _TOKENS) - lines_of(4)) / _TOKENS


def _frame(is_written: bool) -> float:
    """Return the lines that write or read a frame of 64 outputs: few, since msgspec does the rest in C."""
    outputs = (Output(f"cmpl-{number:032x}", 0, 17, (1000 + number,), None) for number in range(64))
    envelope = Envelope("decode-0", 1, 1, Tokens(tuple(outputs)))
    frame = encode(envelope)
    with Lines() as lines:
        if is_written:
            encode(envelope)
        else:
            decode(frame, MOST_FRAME_BYTES)
    return lines.number


def _simulated_step() -> float:
    """Return the lines of a step of 8 running requests, with all that the deployment around does meanwhile.

    The first steps, from which workers learn most, do not count.
    """
    load, begins_s = "sizes:prompt=64,output=100,arrivals=closed,in_flight=8,replace=true,first_s=4", 3.5
    simulation, lines = Simulation(settings_of(SimulationTrial("aligned", load))), Lines()
    simulation.world.agenda.at(begins_s, Priority.CLIENT, lines.begin)
    simulation.run()
    lines.end()
    return lines.number / sum(step.began_at >= begins_s for step in simulation.record(0.0).steps)


PATHS: Mapping[str, Callable[[], float]] = MappingProxyType(
    {
        "router: a decision, 64 workers": partial(_router, 64),
        "router: a decision, 512 workers": partial(_router, 512),
        "router: a decision, 64 workers that know the prompt's beginning": partial(_router, 64, beginning=(5,) * 256),
        "router: a request's life, 64 workers": partial(_router, 64, is_life=True),
        "worker: between two steps of 32 decodes": partial(_decode_step, 32),
        "worker: between two steps of 1,000 decodes": partial(_decode_step, 1_000),
        "worker: a choice among 32 prompts that wait": partial(_prompt_step, 32),
        "worker: a choice among 1,000 prompts that wait": partial(_prompt_step, 1_000),
        "owner: a token": _token_in_owner,
        "gateway: a token of a stream": _token_in_gateway,
        "frame of 64 outputs, written": partial(_frame, is_written=True),
        "frame of 64 outputs, read": partial(_frame, is_written=False),
        "simulator: a step": _simulated_step,
    }
)
