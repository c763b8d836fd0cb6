"""The flags of `alignedserve simulate`, `promise`, `plan`, `reproduce` and `fuzz`.

A command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from alignedserve.cli.serving import PROFILED, add_set, add_setting, config_of, set_of
from alignedserve.cli.terminal.arguments import (
    Each,
    above_zero,
    add_flags,
    all_above_zero,
    check_goes_with,
    file,
    filled,
    flag,
    flag_of,
    flags_of,
    given,
    only_one,
    share,
    switch,
    whole,
    wholes,
    zero_or_more,
)
from alignedserve.config.config import settings
from alignedserve.config.presets import DEFAULT, presets
from alignedserve.errors import ConfigError
from alignedserve.interrupt import LeavesAtOnce
from alignedserve.lab.loads import defaults

# --- simulate

_REPLAY, _DIFF = "--replay", "--diff"
_JOBS = flag("J", "processes that share several runs (default: as many as cores)", type=whole(1))


@dataclass(frozen=True)
class WhatRuns:
    """The flags that say what `simulate` runs."""

    preset: str = flag(
        "P", f"how requests are scheduled: {', '.join(presets())} (default: %(default)s)", DEFAULT, group="what runs"
    )
    settings: tuple[str, ...] = flag_of(add_set, ())  # what --set says, each as path=value
    compare: tuple[str, ...] | None = flag("P", "two or more presets, compared over the same arrivals", nargs="+")
    workload: str = flag(
        "W",
        "which requests come, and when: a name such as chat or coserve, a file, or a kind such as "
        "trace:FILE, each with ,KEY=VALUE behind it (default: %(default)s)",
        defaults.WORKLOAD,
        type=filled,
    )
    cluster: str | None = flag(
        "C", "workers: colocated, 4xcolocated, or prefill+decode such as 1+1 (default: as the presets say)"
    )
    seed: int = flag("N", "seed of the random numbers (default: %(default)s)", 0, type=whole(0))
    seeds: tuple[int, ...] | None = flag("N,N", "a run for each seed", type=wholes(0))
    rates: tuple[float, ...] | None = flag(
        "X,X", "arrivals in a second, in place of the workload's: a run for each rate", type=all_above_zero
    )
    profile: str = flag(
        "GPU",
        "how long steps take: a GPU and a model, such as a100-80-opt-13b-tp1, or a file: of "
        "`alignedserve profile`, of measured grids, or of a device's numbers (default: %(default)s)",
        defaults.PROFILE,
        type=filled,
    )
    transport: str | None = flag(
        None,
        "how KV goes from prefill to decode workers: through the KV pool, or from device to device "
        "(default: as the presets say)",
        choices=("host", "direct"),
    )
    gateway_ms: float = flag(
        "MS",
        "time that a request takes besides steps and frames: HTTP, templates, tokens (default: %(default)g)",
        0.0,
        type=zero_or_more,
    )
    jobs: int | None = _JOBS


@dataclass(frozen=True)
class WhatIsWritten:
    """The flags that name the files of `simulate`."""

    out: Path | None = flag(
        "FOLDER", "folder for everything below but the record", type=file, group="files that are written"
    )
    json: Path | None = flag("FILE", "all figures of all runs", type=file)
    csv: Path | None = flag(
        "FILE", "rows of requests, and of steps in NAME-steps.csv; of several runs a row for each", type=file
    )
    plot: Path | None = flag("FILE", "a .png or .svg (needs matplotlib: the extra `lab`)", type=file)
    timeline: Path | None = flag("FILE", "a trace for ui.perfetto.dev, of a single run", type=file)
    record: Path | None = flag("FILE", "what happened in a single run, as JSON: all figures follow from it", type=file)
    save: Path | None = flag("FILE", "every command of every part in a single run, for --replay and --diff", type=file)
    page: Path | None = flag(
        "FILE", "a single run as the live page, with a slider of its time: open it in a browser", type=file
    )
    timeline_limit: float = flag("S", "the part of a timeline that begins in the first S seconds", inf, type=above_zero)


@dataclass(frozen=True)
class WhatIsSaved:
    """The flags of saved runs, which have no other flag beside them."""

    replay: Path | None = flag(
        "FILE",
        "repeat a saved run, and say whether it is the same",
        type=file,
        group="saved runs (no other flag goes with these)",
    )
    diff: list[Path] | None = flag("FILE", "show the first difference of two saved runs", type=file, nargs=2)


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Runs a workload through a whole deployment in virtual time, without a model or a GPU, and prints the figures.
    Several presets, seeds or rates are compared: each figure is a mean over the seeds and half its range.
    docs/how/simulate.md says the rest."""
    parser.usage = "%(prog)s [flags]\n       %(prog)s --replay FILE\n       %(prog)s --diff FILE FILE"
    for declared in (WhatRuns, WhatIsWritten, WhatIsSaved):
        add_flags(parser, declared)
    parser.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> int:
    if (mode := only_one(args, _REPLAY, _DIFF)) is not None:
        return _simulate_saved(args, mode)
    only_one(args, "--preset", "--compare")
    only_one(args, "--seed", "--seeds")
    check_goes_with(args, "--timeline-limit", ("--timeline", "--out"), given(args))

    with LeavesAtOnce():
        from alignedserve.lab.cli.simulate import run

    presets = _presets(args)
    return run(replace(flags_of(args, WhatRuns), settings=set_of(args)), presets, flags_of(args, WhatIsWritten))


def _simulate_saved(args: argparse.Namespace, mode: str) -> int:
    if others := sorted(given(args) - {mode}):
        raise ConfigError(f"{mode} takes no other flag, such as {others[0]}: a saved run says what was run")
    with LeavesAtOnce():
        from alignedserve.lab.cli.simulate import diff, replay

    return diff(*args.diff) if mode == _DIFF else replay(args.replay)


def _presets(args: argparse.Namespace) -> tuple[str, ...]:
    if args.compare is None:
        return (args.preset,)
    if len(args.compare) < 2:
        raise ConfigError(
            f"--compare takes two presets or more, such as fcfs aligned: {args.compare[0]!r:.40} alone is --preset"
        )
    if len(set(args.compare)) < len(args.compare):
        raise ConfigError(f"--compare {' '.join(args.compare)} names a preset twice")
    return tuple(args.compare)


# --- reproduce


@dataclass(frozen=True)
class WhatIsReproduced:
    """The flags of `reproduce`."""

    figure: str | None = flag("N,N", "some of the paper's figures (default: all)", type=filled)
    seeds: tuple[int, ...] = flag("N,N", "a run for each seed (default: 0,1,2)", (0, 1, 2), type=wholes(0))
    full: bool = switch("the papers' own sizes, which take hours")
    jobs: int | None = _JOBS
    out: Path | None = flag("FOLDER", "folder for a page, pictures and JSON", type=file)


def add_reproduce(parser: argparse.ArgumentParser) -> None:
    """Runs the figures of papers in virtual time: their workloads, the systems that they compare and our default.
    Prints what each paper says beside what came out. --out FOLDER writes them as a page with pictures."""
    parser.add_argument("paper", nargs="?", metavar="PAPER", help="a paper, such as bros (default: all)")
    add_flags(parser, WhatIsReproduced)
    parser.set_defaults(run=_reproduce)


def _reproduce(args: argparse.Namespace) -> int:
    if args.figure is not None and args.paper is None:
        raise ConfigError("--figure needs a paper, such as: alignedserve reproduce bros --figure 11a-ttft")
    with LeavesAtOnce():
        from alignedserve.lab.cli.reproduce import run
        from alignedserve.lab.reproduce.papers import chosen
    return run(chosen(args.paper, args.figure and args.figure.split(",")), flags_of(args, WhatIsReproduced))


# --- fuzz

_SEEDS, _ENDLESS, _ONE = "--seeds", "--until-failure", "--seed"
_FUZZ_GOES_WITH = {
    "--start": (_SEEDS, _ENDLESS),
    "--jobs": (_SEEDS, _ENDLESS),
    "--save": (_SEEDS, _ENDLESS, _ONE),
}


@dataclass(frozen=True)
class WhatIsFuzzed(WhatIsSaved):
    """The flags of `fuzz`."""

    seeds: int = flag("N", "how many seeds (default: %(default)s)", 200, type=whole(1), group="what to run")
    until_failure: bool = switch("run seeds without end, until a seed fails")
    seed: int | None = flag("N", "run this seed alone, and show what happens in it", type=whole(0))
    start: int = flag("S", "the first seed (default: %(default)s)", 0, type=whole(0), group="of many seeds")
    jobs: int = flag("J", "processes (default: %(default)s)", 1, type=whole(1))
    save: Path | None = flag(
        "FILE", "the run of --seed, or the first of many seeds that fails, shrunk", type=file, group="what is written"
    )


def add_fuzz(parser: argparse.ArgumentParser) -> None:
    """Injects faults that follow from seeds into simulated deployments, and checks what must hold after every event.
    Exits with 1 where a seed fails, or where runs that are compared differ."""
    parser.usage = (
        "%(prog)s [--seeds N | --until-failure]\n"
        "                         [--start S] [--jobs J] [--save FILE]\n"
        "       %(prog)s --seed N [--save FILE]\n"
        "       %(prog)s --replay FILE\n"
        "       %(prog)s --diff FILE FILE"
    )
    add_flags(parser, WhatIsFuzzed)
    parser.set_defaults(run=_fuzz)


def _fuzz(args: argparse.Namespace) -> int:
    mode = only_one(args, _SEEDS, _ENDLESS, _ONE, _REPLAY, _DIFF) or _SEEDS
    for name, modes in _FUZZ_GOES_WITH.items():
        check_goes_with(args, name, modes, (mode,))
    if mode == _SEEDS and args.jobs > args.seeds:
        raise ConfigError(f"--jobs {args.jobs} is more than there are seeds, --seeds {args.seeds}")
    with LeavesAtOnce():
        from alignedserve.lab.cli.fuzz import run
    return run(flags_of(args, WhatIsFuzzed))


# --- promise


def add_promise(parser: argparse.ArgumentParser) -> None:
    """Prints when the first tokens come to people who ask at once, how long the gaps between later tokens are, and how
    many tokens a second documents get beside them: simulated, with steps as this machine runs them."""
    parser.usage = "%(prog)s [MODEL] [flags]"
    what = "another machine: a device or a file as --profile of `simulate` takes, or with MODEL a GPU, such as h100"
    parser.add_argument("--device", type=filled, metavar="NAME|FILE", help=what)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    for path in PROFILED:
        add_setting(parser, settings()[path])
    parser.set_defaults(run=_promise)


def _promise(args: argparse.Namespace) -> int:
    from alignedserve.lab.cli.promise import run

    return run(config_of(args), args.device, as_json=args.json)


# --- plan


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
    prefill workers, by simulations. The answer and its neighbours are checked on fresh seeds. docs/guides/measure.md
    says how to ask. Exits with 1 where nothing keeps the promises."""
    add_flags(parser, WhatIsPlanned)
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    if not args.device and args.devices is None:
        raise ConfigError("name the devices that can be had, such as --device h100-llama-3.1-8b-tp1:3.90")
    with LeavesAtOnce():
        from alignedserve.lab.cli.plan import run
    return run(replace(flags_of(args, WhatIsPlanned), settings=set_of(args)))
