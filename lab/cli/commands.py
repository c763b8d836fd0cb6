"""The lab's commands: each adds its flags (flags.py), and runs a module that it imports then.

A command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from alignedserve.cli.serving import PROFILED, add_setting, config_of, set_of
from alignedserve.cli.terminal.arguments import (
    add_flags,
    check_goes_with,
    check_writable,
    filled,
    flags_of,
    given,
    only_one,
)
from alignedserve.config.config import settings
from alignedserve.errors import ConfigError
from alignedserve.interrupt import LeavesAtOnce
from alignedserve.lab.cli.flags import (
    BenchOptions,
    FuzzFlags,
    OutputFlags,
    RunFlags,
    WhatIsPlanned,
    WhatIsReproduced,
    WhatIsSaved,
)

# --- simulate

_REPLAY, _DIFF = "--replay", "--diff"


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Runs a workload through a whole deployment in virtual time, without a model or a GPU, and prints the figures.
    Several presets, seeds or rates are compared: each figure is a mean over the seeds and half its range.
    docs/how/simulate.md says the rest."""
    parser.usage = "%(prog)s [flags]\n       %(prog)s --replay FILE\n       %(prog)s --diff FILE FILE"
    for declared in (RunFlags, OutputFlags, WhatIsSaved):
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
    return run(replace(flags_of(args, RunFlags), settings=set_of(args)), presets, flags_of(args, OutputFlags))


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
    add_flags(parser, FuzzFlags)
    parser.set_defaults(run=_fuzz)


def _fuzz(args: argparse.Namespace) -> int:
    mode = only_one(args, _SEEDS, _ENDLESS, _ONE, _REPLAY, _DIFF) or _SEEDS
    for name, modes in _FUZZ_GOES_WITH.items():
        check_goes_with(args, name, modes, (mode,))
    if mode == _SEEDS and args.jobs > args.seeds:
        raise ConfigError(f"--jobs {args.jobs} is more than there are seeds, --seeds {args.seeds}")
    with LeavesAtOnce():
        from alignedserve.lab.cli.fuzz import run
    return run(flags_of(args, FuzzFlags))


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


# --- bench


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Puts a load on any server that has OpenAI's HTTP API, and measures what its clients get. The load is written as
    for `simulate`, so the same load can be simulated. docs/guides/measure.md says the rest."""
    add_flags(parser, BenchOptions)
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    for path in filter(None, (args.json, args.csv, args.page)):
        check_writable(path)
    if args.runs and (others := sorted(given(args) - {"--from", "--json", "--csv", "--page"})):
        raise ConfigError(f"--from measures nothing, so {others[0]} has no effect beside it")
    if args.url in args.compare or len(set(args.compare)) < len(args.compare):
        raise ConfigError("--compare names a server twice")
    with LeavesAtOnce():
        from alignedserve.lab.cli.bench import run, show

    return (show if args.runs else run)(flags_of(args, BenchOptions))
