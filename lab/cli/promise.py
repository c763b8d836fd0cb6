"""`alignedserve promise`: shows what people get who ask at once, for each length of prompt, before anything is served.

The steps are those of a profile: of this machine, measured now or taken from the cache as a worker does it, or of
another. What the same cores make of these steps is simulated, a cell at a time, in a process for each core. Few wait
two minutes for a first token: cells whose prompts alone take longer are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from alignedserve.config.config import Config
from alignedserve.core import Slo
from alignedserve.cost.model import Shape
from alignedserve.cost.profile import save
from alignedserve.cost.promising import machine_promise
from alignedserve.errors import ConfigError, SimulateError
from alignedserve.lab.devices import devices
from alignedserve.lab.loads.figures.tables import table
from alignedserve.lab.processes import one_for_each_core, processes
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.trials.building import device_of, settings_of
from alignedserve.lab.trials.crowd import ANSWER, REFUSES_NONE, Crowd, CrowdFigures, figures_of

_PEOPLE, _PROMPTS = (1, 2, 4, 8, 16, 32), (100, 500, 2000, 8000)
_MOST_S = 120.0  # that all prompts of a cell may take
_GATEWAY_MS = 8.0  # that HTTP, templates and tokens add to a first token


@dataclass(frozen=True)
class _Machine:
    """What is asked about: a model on a device, by the profile that a simulation takes."""

    name: str
    profile: str
    longest: int | None = None  # tokens of a request; None: as many as the memory holds


_NOTE = f"Answers have {ANSWER} tokens. -: the prompts alone take more than {_MOST_S / 60:g} minutes."


@dataclass(frozen=True)
class PromiseTable:
    machine: str
    promise: Slo  # to chats that ask for nothing
    cells: Sequence[CrowdFigures]

    def document(self) -> str:
        slo = self.promise
        promise = {"ttft_ms": 1e3 * slo.ttft_s, "tbt_ms": 1e3 * slo.tbt_s}
        cells = [asdict(cell) for cell in self.cells]
        return json.dumps({"machine": self.machine, "promise": promise, "answer": ANSWER, "cells": cells})

    def text(self) -> str:
        people = sorted({cell.people for cell in self.cells})
        found = {(cell.prompt, cell.people): cell for cell in self.cells}
        prompts = sorted({cell.prompt for cell in self.cells})
        rows = [["people who ask at once", *map(str, people)]]
        for title, field, unit in (
            ("first token (p95), s", "first_token_s", 1.0),
            ("gap between later tokens (p99), ms", "gap_s", 1e3),
            ("tokens/s of documents beside them", "documents_tokens_s", 1.0),
        ):
            rows.append([title, *[""] * len(people)])
            for prompt in prompts:
                cells = [found.get((prompt, number)) for number in people]
                values = ["-" if cell is None else _short(unit * getattr(cell, field)) for cell in cells]
                rows.append([f"  prompts of {prompt:,} tokens", *values])
        return f"{self.machine}\npromise: {self.promise.in_words} (what this machine keeps)\n\n{table(rows)}\n{_NOTE}\n"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.2g}"


def run(config: Config, device: str | None, as_json: bool) -> int:
    with ExitStack() as stack:
        if device is None:
            machine = _measured(config, Path(stack.enter_context(TemporaryDirectory())) / "profile.json")
        else:
            machine = _named(config, device)
        told = _table(machine)
    print(told.document() if as_json else told.text(), end="\n" if as_json else "")
    return 0


def _named(config: Config, device: str) -> _Machine:
    is_gpu = device in devices.GPUS and devices.model_named(config.model) is not None
    name = f"{device}-{config.model}-tp1" if is_gpu else device
    try:
        device_of(SimulationTrial("aligned", profile=name))
    except SimulateError as error:
        raise SimulateError(str(error).replace("--profile", "--device")) from None
    return _Machine(name, name)


def _measured(config: Config, path: Path) -> _Machine:
    """Write the profile of this machine as it is now: with the slowdown by what else runs here."""
    from alignedserve.architectures.model_source import cache_directory
    from alignedserve.cli.profile import open_meter
    from alignedserve.engine.profiling import start_profile

    opened = open_meter(config)
    config, meter, bounds = opened.config, opened.meter, opened.bounds
    if not meter.engine.config.generates:
        raise ConfigError(f"{config.model} writes no text: its answers have no first token to promise")
    folder, budget_s = cache_directory(config.cache_directory), config.engine.profile_s
    profile = start_profile(meter, bounds, opened.subject, Path(config.kvpool.directory), folder, budget_s, True)
    save(replace(profile, model=profile.online().model), path)
    name = f"{config.model_names[0]} on {profile.subject.device}, {profile.quietness}"
    return _Machine(name, str(path), bounds.longest)


def _table(machine: _Machine) -> PromiseTable:
    trial = SimulationTrial("aligned", profile=machine.profile, options=(REFUSES_NONE,), gateway_ms=_GATEWAY_MS)
    settings = settings_of(trial)
    longest = min(machine.longest or settings.limits.num_tokens, settings.limits.num_tokens)
    if longest <= ANSWER:
        raise ConfigError(f"a request may have {longest} tokens here, and answers of {ANSWER} do not fit")
    assert settings.belief is not None, "workers of a trial start with a profile"
    model = settings.belief().model
    promise = machine_promise(model, settings.limits, longest)
    fitting = [prompt for prompt in _PROMPTS if prompt + ANSWER <= longest] or [longest - ANSWER]
    tasks = [
        _CrowdTask(trial, Crowd(people, prompt, promise))
        for prompt in reversed(fitting)  # the longest first, so that all processes end together
        for people in reversed(_PEOPLE)
        if people * model.seconds(Shape.build([(prompt, 0)])) <= _MOST_S
    ]
    with processes(one_for_each_core()) as started:
        cells = sorted(started.as_done(_simulate, tasks), key=lambda cell: (cell.prompt, cell.people))
    return PromiseTable(machine.name, promise, cells)


@dataclass(frozen=True, slots=True)
class _CrowdTask:
    """A simulation for one of the processes."""

    trial: SimulationTrial
    crowd: Crowd


def _simulate(task: _CrowdTask) -> CrowdFigures:
    return figures_of(task.trial, task.crowd)
