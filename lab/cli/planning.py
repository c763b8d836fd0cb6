"""The flags of `alignedserve plan`. A command imports what it needs when it runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from alignedserve.cli.serving import add_set, set_of
from alignedserve.cli.terminal.arguments import Each, above_zero, file, filled, share, whole
from alignedserve.cli.terminal.declared import add_flags, flag, flag_of, flags_of
from alignedserve.cli.terminal.interrupt import LeavesAtOnce
from alignedserve.config.presets import DEFAULT
from alignedserve.errors import ConfigError
from alignedserve.loads import defaults


@dataclass(frozen=True)
class WhatIsPlanned:
    """The flags of `plan`."""

    workload: str = flag(
        "W",
        "which requests come, when, and what they are promised, as `simulate` takes it: trace:FILE, "
        "lengths:FILE,rate=20, chat,rate=20,ttft_s=0.5 (default: %(default)s)",
        defaults.WORKLOAD,
        type=filled,
        group="what is asked",
    )
    attain: float = flag(
        "SHARE", "share of the chats that keep their ttft and tbt (default: %(default)g)", 0.99, type=share
    )
    be_attain: float | None = flag(
        "SHARE", "share of the documents that end within their completion window (default: as --attain)", type=share
    )
    be_tokens: float | None = flag("N", "output of all documents, in tokens a second", type=above_zero)
    device: tuple[str, ...] = flag(
        "DEVICE:PRICE",
        "a device that can be had, and the price of one of its GPUs an hour: h100-llama-3.1-8b-tp1:3.90, a file "
        "as --profile of `simulate` takes, or with --model a GPU, such as h100:3.90; may be given again",
        (),
        action=Each,
        type=filled,
    )
    devices: Path | None = flag("FILE", "the same as YAML, a line DEVICE: PRICE for each", type=file)
    price_kwh: float | None = flag(
        "PRICE", "of a kWh, which each GPU takes its most of: added to the prices", type=above_zero
    )
    model: str | None = flag("M", "the model, where devices are GPUs alone: 1, 2, 4 or 8 of each hold it", type=filled)
    workers: int = flag("N", "most workers (default: %(default)s)", 16, type=whole(1), group="how it is searched")
    preset: str = flag("P", "how requests are scheduled (default: %(default)s)", DEFAULT)
    settings: tuple[str, ...] = flag_of(add_set, ())  # what --set says, each as path=value
    seed: int = flag("N", "seed of the search; the check takes the next three (default: %(default)s)", 0, type=whole(0))
    jobs: int | None = flag("J", "processes (default: as many as cores)", type=whole(1))
    out: Path | None = flag(
        "FILE",
        "settings of the answer, for `alignedserve serve --config FILE`",
        type=file,
        group="files that are written",
    )
    plot: Path | None = flag(
        "FILE",
        "attainment against size and against load, a .png or .svg (needs matplotlib: the extra `lab`)",
        type=file,
    )
    json: Path | None = flag("FILE", "everything that was found", type=file)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Finds the cheapest deployment that keeps the workload's promises: which device, how many, colocated or with
    prefill workers, by simulations. The answer and its neighbours are checked on fresh seeds. docs/reference/plan.md
    says how to ask. Exits with 1 where nothing keeps the promises."""
    add_flags(parser, WhatIsPlanned)
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    if not args.device and args.devices is None:
        raise ConfigError("name the devices that can be had, such as --device h100-llama-3.1-8b-tp1:3.90")
    with LeavesAtOnce():
        from alignedserve.lab.cli.plan import run
    return run(replace(flags_of(args, WhatIsPlanned), settings=set_of(args)))
