"""The flags of `alignedserve simulate`, `reproduce` and `fuzz`. A command imports what it needs when it runs."""

from __future__ import annotations

import argparse
from functools import partial
from math import inf

from alignedserve.cli.serving import add_policy, add_set, set_of
from alignedserve.cli.terminal.arguments import (
    Once,
    above_zero,
    all_above_zero,
    check_goes_with,
    file,
    filled,
    given,
    only_one,
    whole,
    wholes,
    zero_or_more,
)
from alignedserve.cli.terminal.interrupt import LeavesAtOnce
from alignedserve.config.presets import DEFAULT, PRESETS
from alignedserve.errors import ConfigError
from alignedserve.simulator.trials import defaults

# --- simulate

_REPLAY, _DIFF = "--replay", "--diff"


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [flags]\n       %(prog)s --replay FILE\n       %(prog)s --diff FILE FILE"
    parser.description = (
        "Runs a workload through a whole deployment in virtual time, without a model or a GPU, and prints the figures. "
        "Several presets, seeds or rates are compared: each figure is a mean over the seeds and half its range. "
        "docs/how/simulator.md, docs/reference/figures.md and docs/reference/workloads.md say the rest."
    )
    _add_what_runs(parser.add_argument_group("what runs"))
    _add_what_is_written(parser.add_argument_group("files that are written"))
    _add_saved(parser.add_argument_group("saved runs (no other flag goes with these)"))
    parser.set_defaults(run=_simulate, parser=parser)


def _add_what_runs(group: argparse._ArgumentGroup) -> None:
    presets = ", ".join(PRESETS)
    group.add_argument(
        "--preset",
        action=Once,
        metavar="P",
        default=DEFAULT,
        help=f"how requests are scheduled: {presets} (default: %(default)s)",
    )
    add_set(group)
    add_policy(group)
    group.add_argument(
        "--compare", action=Once, nargs="+", metavar="P", help="two or more presets, compared over the same arrivals"
    )
    group.add_argument(
        "--workload",
        action=Once,
        type=filled,
        metavar="W",
        default=defaults.WORKLOAD,
        help="which requests come, and when: a name such as chat or coserve, a file, or a kind such as "
        "trace:FILE, each with ,KEY=VALUE behind it (default: %(default)s)",
    )
    group.add_argument(
        "--cluster",
        action=Once,
        metavar="C",
        help="workers: colocated, 4xcolocated, or prefill+decode such as 1+1 (default: as the presets say)",
    )
    group.add_argument(
        "--seed",
        action=Once,
        type=whole(0),
        metavar="N",
        default=0,
        help="seed of the random numbers (default: %(default)s)",
    )
    group.add_argument("--seeds", action=Once, type=wholes(0), metavar="N,N", help="a run for each seed")
    group.add_argument(
        "--rates",
        action=Once,
        type=all_above_zero,
        metavar="X,X",
        help="arrivals in a second, in place of the workload's: a run for each rate",
    )
    group.add_argument(
        "--profile",
        action=Once,
        type=filled,
        metavar="GPU",
        default=defaults.PROFILE,
        help="how long steps take: a GPU and a model, such as a100-80-opt-13b-tp1, or a file: of "
        "`alignedserve profile`, of measured grids, or of a device's numbers (default: %(default)s)",
    )
    group.add_argument(
        "--transport",
        action=Once,
        choices=("host", "direct"),
        help="how KV goes from prefill to decode workers: through the KV pool, or from device to device "
        "(default: as the presets say)",
    )
    group.add_argument(
        "--gateway-ms",
        action=Once,
        type=zero_or_more,
        metavar="MS",
        default=0.0,
        help="time that a request takes besides steps and frames: HTTP, templates, tokens (default: %(default)g)",
    )
    _add_jobs(group)


def _add_jobs(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--jobs",
        action=Once,
        type=whole(1),
        metavar="J",
        help="processes that share several runs (default: as many as cores)",
    )


def _add_what_is_written(group: argparse._ArgumentGroup) -> None:
    add = partial(group.add_argument, action=Once, type=file)
    add("--out", metavar="FOLDER", help="folder for everything below but the record")
    add("--json", metavar="FILE", help="all figures of all runs")
    add(
        "--csv", metavar="FILE", help="rows of requests, and of steps in NAME-steps.csv; of several runs a row for each"
    )
    add("--plot", metavar="FILE", help="a .png or .svg (needs matplotlib: the extra `simulate`)")
    add("--timeline", metavar="FILE", help="a trace for ui.perfetto.dev, of a single run")
    add("--record", metavar="FILE", help="what happened in a single run, as JSON: all figures follow from it")
    add("--save", metavar="FILE", help="every command of every part in a single run, for --replay and --diff")
    add("--page", metavar="FILE", help="a single run as the live page, with a slider of its time: open it in a browser")
    group.add_argument(
        "--timeline-limit",
        action=Once,
        type=above_zero,
        metavar="S",
        default=inf,
        help="the part of a timeline that begins in the first S seconds",
    )


def _add_saved(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        _REPLAY, action=Once, type=file, metavar="FILE", help="repeat a saved run, and say whether it is the same"
    )
    group.add_argument(
        _DIFF, action=Once, type=file, nargs=2, metavar="FILE", help="show the first difference of two saved runs"
    )


def _simulate(args: argparse.Namespace) -> int:
    if (mode := only_one(args, _REPLAY, _DIFF)) is not None:
        return _simulate_saved(args, mode)
    only_one(args, "--preset", "--compare")
    only_one(args, "--seed", "--seeds")
    check_goes_with(args, "--timeline-limit", ("--timeline", "--out"), given(args))

    with LeavesAtOnce():
        from alignedserve.cli.simulate import SimulateOptions, run
        from alignedserve.simulator.reports.trial import SimulationTrial
        from alignedserve.simulator.trials.building import cluster_of

    presets = _presets(args)
    return run(
        SimulateOptions(
            common=SimulationTrial(
                args.preset,
                args.workload,
                args.cluster or cluster_of(presets),
                profile=args.profile,
                direct=None if args.transport is None else args.transport == "direct",
                options=set_of(args),
                gateway_ms=args.gateway_ms,
            ),
            presets=presets,
            seeds=args.seeds or (args.seed,),
            rates=args.rates or (),
            out=args.out,
            json=args.json,
            csv=args.csv,
            plot=args.plot,
            timeline=args.timeline,
            timeline_s=args.timeline_limit,
            record=args.record,
            save=args.save,
            page=args.page,
            jobs=args.jobs,
        )
    )


def _simulate_saved(args: argparse.Namespace, mode: str) -> int:
    if others := sorted(given(args) - {mode}):
        raise ConfigError(f"{mode} takes no other flag, such as {others[0]}: a saved run says what was run")
    with LeavesAtOnce():
        from alignedserve.cli.simulate import diff, replay

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
    parser.description = (
        "Runs the figures of papers in virtual time: their workloads, the systems that they compare and our default. "
        "Prints what each paper says beside what came out. docs/reproductions.md is what --out docs writes."
    )
    parser.add_argument("paper", nargs="?", metavar="PAPER", help="a paper, such as bros (default: all)")
    parser.add_argument(
        "--figure", action=Once, type=filled, metavar="N,N", help="some of the paper's figures (default: all)"
    )
    parser.add_argument(
        "--seeds",
        action=Once,
        type=wholes(0),
        metavar="N,N",
        default=(0, 1, 2),
        help="a run for each seed (default: 0,1,2)",
    )
    parser.add_argument(
        "--full", action=Once, nargs=0, const=True, default=False, help="the papers' own sizes, which take hours"
    )
    _add_jobs(parser)
    parser.add_argument("--out", action=Once, type=file, metavar="FOLDER", help="folder for a page, pictures and JSON")
    parser.set_defaults(run=_reproduce, parser=parser)


def _reproduce(args: argparse.Namespace) -> int:
    if args.figure is not None and args.paper is None:
        raise ConfigError("--figure needs a paper, such as: alignedserve reproduce bros --figure 11a-ttft")
    with LeavesAtOnce():
        from alignedserve.cli.reproduce import ReproduceOptions, run
        from alignedserve.simulator.reproduce.papers import chosen

    papers = chosen(args.paper, args.figure and args.figure.split(","))
    return run(ReproduceOptions(papers, args.seeds, args.full, args.jobs, args.out))


# --- fuzz

_SEEDS, _ENDLESS, _ONE = "--seeds", "--until-failure", "--seed"
_FUZZ_GOES_WITH = {
    "--start": (_SEEDS, _ENDLESS),
    "--jobs": (_SEEDS, _ENDLESS),
    "--policy": (_SEEDS, _ENDLESS, _ONE),
    "--save": (_SEEDS, _ENDLESS, _ONE),
}


def add_fuzz(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [--seeds N | --until-failure]\n"
        "                         [--start S] [--jobs J] [--policy FILE] [--save FILE]\n"
        "       %(prog)s --seed N [--policy FILE] [--save FILE]\n"
        "       %(prog)s --replay FILE\n"
        "       %(prog)s --diff FILE FILE"
    )
    parser.description = (
        "Injects faults that follow from seeds into simulated deployments, and checks what must hold after every "
        "event. Exits with 1 where a seed fails, or where runs that are compared differ."
    )
    what = parser.add_argument_group("what to run")
    what.add_argument(
        _SEEDS, action=Once, type=whole(1), metavar="N", default=200, help="how many seeds (default: %(default)s)"
    )
    what.add_argument(
        _ENDLESS, action=Once, nargs=0, const=True, default=False, help="run seeds without end, until a seed fails"
    )
    what.add_argument(
        _ONE, action=Once, type=whole(0), metavar="N", help="run this seed alone, and show what happens in it"
    )
    add_policy(what)
    _add_saved(what)
    many = parser.add_argument_group("of many seeds")
    many.add_argument(
        "--start", action=Once, type=whole(0), metavar="S", default=0, help="the first seed (default: %(default)s)"
    )
    many.add_argument(
        "--jobs", action=Once, type=whole(1), metavar="J", default=1, help="processes (default: %(default)s)"
    )
    written = parser.add_argument_group("what is written")
    written.add_argument(
        "--save",
        action=Once,
        type=file,
        metavar="FILE",
        help="the run of --seed, or the first of many seeds that fails, shrunk",
    )
    parser.set_defaults(run=_fuzz, parser=parser)


def _fuzz(args: argparse.Namespace) -> int:
    mode = only_one(args, _SEEDS, _ENDLESS, _ONE, _REPLAY, _DIFF) or _SEEDS
    for flag, modes in _FUZZ_GOES_WITH.items():
        check_goes_with(args, flag, modes, (mode,))
    if mode == _SEEDS and args.jobs > args.seeds:
        raise ConfigError(f"--jobs {args.jobs} is more than there are seeds, --seeds {args.seeds}")

    with LeavesAtOnce():
        from alignedserve.cli.fuzz import FuzzOptions, run
        from alignedserve.policies.source import PolicySource, check

    return run(
        FuzzOptions(
            seeds=args.seeds,
            start=args.start,
            jobs=args.jobs,
            until_failure=args.until_failure,
            seed=args.seed,
            save=args.save,
            replay=args.replay,
            diff=tuple(args.diff) if args.diff else None,
            policy=check(PolicySource.parse(args.policy)) if args.policy else None,
        )
    )
