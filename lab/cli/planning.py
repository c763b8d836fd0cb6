"""The flags of `alignedserve plan`. A command imports what it needs when it runs."""

from __future__ import annotations

import argparse
from functools import partial

from alignedserve.cli.serving import add_set
from alignedserve.cli.terminal.arguments import Each, Once, above_zero, file, filled, share, whole
from alignedserve.cli.terminal.interrupt import LeavesAtOnce
from alignedserve.config.presets import DEFAULT
from alignedserve.errors import ConfigError
from alignedserve.loads import defaults


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Finds the cheapest deployment that keeps the workload's promises: which device, how many, colocated or with "
        "prefill workers, by simulations. The answer and its neighbours are checked on fresh seeds. "
        "docs/reference/plan.md says how to ask. Exits with 1 where nothing keeps the promises."
    )
    _add_question(parser.add_argument_group("what is asked"))
    _add_search(parser.add_argument_group("how it is searched"))
    _add_files(parser.add_argument_group("files that are written"))
    parser.set_defaults(run=_plan, parser=parser)


def _add_question(group: argparse._ArgumentGroup) -> None:
    add = partial(group.add_argument, action=Once)
    add(
        "--workload",
        type=filled,
        metavar="W",
        default=defaults.WORKLOAD,
        help="which requests come, when, and what they are promised, as `simulate` takes it: trace:FILE, "
        "lengths:FILE,rate=20, chat,rate=20,ttft_s=0.5 (default: %(default)s)",
    )
    add(
        "--attain",
        type=share,
        metavar="SHARE",
        default=0.99,
        help="share of the chats that keep their ttft and tbt (default: %(default)g)",
    )
    add(
        "--be-attain",
        type=share,
        metavar="SHARE",
        help="share of the documents that end within their completion window (default: as --attain)",
    )
    add("--be-tokens", type=above_zero, metavar="N", help="output of all documents, in tokens a second")
    group.add_argument(
        "--device",
        action=Each,
        default=(),
        type=filled,
        metavar="DEVICE:PRICE",
        help="a device that can be had, and the price of one of its GPUs an hour: h100-llama-3.1-8b-tp1:3.90, a file "
        "as --profile of `simulate` takes, or with --model a GPU, such as h100:3.90; may be given again",
    )
    add("--devices", type=file, metavar="FILE", help="the same as YAML, a line DEVICE: PRICE for each")
    add(
        "--model",
        type=filled,
        metavar="M",
        help="the model, where devices are GPUs alone: 1, 2, 4 or 8 of each hold it",
    )


def _add_search(group: argparse._ArgumentGroup) -> None:
    add = partial(group.add_argument, action=Once)
    add("--workers", type=whole(1), metavar="N", default=16, help="most workers (default: %(default)s)")
    add("--preset", metavar="P", default=DEFAULT, help="how requests are scheduled (default: %(default)s)")
    add_set(group)
    add(
        "--seed",
        type=whole(0),
        metavar="N",
        default=0,
        help="seed of the search; the check takes the next three (default: %(default)s)",
    )
    add("--jobs", type=whole(1), metavar="J", help="processes (default: as many as cores)")


def _add_files(group: argparse._ArgumentGroup) -> None:
    add = partial(group.add_argument, action=Once, type=file, metavar="FILE")
    add("--out", help="settings of the answer, for `alignedserve serve --config FILE`")
    add(
        "--plot",
        help="attainment against size and against load, a .png or .svg (needs matplotlib: the extra `lab`)",
    )
    add("--json", help="everything that was found")


def _plan(args: argparse.Namespace) -> int:
    if not args.device and args.devices is None:
        raise ConfigError("name the devices that can be had, such as --device h100-llama-3.1-8b-tp1:3.90")
    with LeavesAtOnce():
        from alignedserve.lab.cli.plan import PlanOptions, run

    return run(
        PlanOptions(
            workload=args.workload,
            attain=args.attain,
            be_attain=args.attain if args.be_attain is None else args.be_attain,
            be_tokens_per_s=args.be_tokens,
            devices=args.device,
            devices_file=args.devices,
            model=args.model,
            workers=args.workers,
            preset=args.preset,
            settings=args.set,
            seed=args.seed,
            jobs=args.jobs,
            out=args.out,
            plot=args.plot,
            json=args.json,
        )
    )
