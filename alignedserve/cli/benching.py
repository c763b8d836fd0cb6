"""The flags of `alignedserve bench`. The command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
from functools import partial

from alignedserve.cli.clients import here
from alignedserve.cli.terminal.arguments import Once, above_zero, check_writable, file, filled, given, options_of, whole
from alignedserve.cli.terminal.interrupt import LeavesAtOnce
from alignedserve.config.config import settings
from alignedserve.errors import ConfigError
from alignedserve.loads import defaults

_FROM, _WRITTEN = "--from", ("--json", "--csv", "--page")


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Puts a load on any server that has OpenAI's HTTP API, and measures what its clients get. The load is "
        "written as for `simulate`, so the same load can be simulated. docs/reference/bench.md says the rest."
    )
    _add_server(parser.add_argument_group("the server"))
    _add_load(parser.add_argument_group("the load"))
    _add_what_is_written(parser.add_argument_group("files that are written"))
    parser.set_defaults(run=_bench, parser=parser)


def _add_server(group: argparse._ArgumentGroup) -> None:
    key = settings()["server.api_key"].variable
    group.add_argument("--url", action=Once, type=filled, default=here(), help="its address (default: %(default)s)")
    group.add_argument(
        "--compare",
        action=Once,
        nargs="+",
        type=filled,
        default=(),
        metavar="URL",
        help="more servers, which are asked the same in turns",
    )
    group.add_argument("--model", action=Once, type=filled, help="default: the first model that a server lists")
    group.add_argument("--api-key", action=Once, default=os.environ.get(key), help=f"default: {key}")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workload",
        action=Once,
        type=filled,
        metavar="W",
        default=defaults.WORKLOAD,
        help="which requests come, when, and what they are promised: a name such as chat or coserve, a file, or a kind "
        "such as trace:FILE, each with ,KEY=VALUE behind it (default: %(default)s)",
    )
    group.add_argument(
        "--seed", action=Once, type=whole(0), default=0, metavar="N", help="of lengths and times (default: %(default)s)"
    )
    group.add_argument(
        "--chat",
        dest="is_chat",
        action=Once,
        nargs=0,
        const=True,
        default=False,
        help="ask /chat/completions with words, in place of /completions with token ids",
    )
    group.add_argument(
        "--batch",
        dest="as_job",
        action=Once,
        nargs=0,
        const=True,
        default=False,
        help="best-effort requests are the lines of one batch job, in place of requests with service_tier flex",
    )
    group.add_argument(
        "--rounds",
        action=Once,
        type=whole(1),
        default=1,
        metavar="N",
        help="so many loads in turns on each server, each with a seed of its own (default: %(default)s)",
    )
    group.add_argument(
        "--warm-up",
        action=Once,
        type=whole(0),
        default=4,
        metavar="N",
        help="so many requests of each stream before, which do not count (default: %(default)s)",
    )
    group.add_argument(
        "--timeout",
        dest="timeout_s",
        action=Once,
        type=above_zero,
        default=600.0,
        metavar="S",
        help="a request ends when its server is silent for so long (default: %(default)g)",
    )


def _add_what_is_written(group: argparse._ArgumentGroup) -> None:
    add = partial(group.add_argument, action=Once, type=file)
    add("--json", metavar="FILE", help="all figures, and when each token came")
    add("--csv", metavar="FILE", help="a row for each request")
    add("--page", metavar="FILE", help="a page of HTML with a table and plots")
    group.add_argument(
        _FROM,
        dest="from_files",
        action=Once,
        nargs="+",
        type=file,
        default=(),
        metavar="RUN",
        help="files of --json, whose runs are shown and written in place of measuring",
    )


def _bench(args: argparse.Namespace) -> int:
    for path in filter(None, (args.json, args.csv, args.page)):
        check_writable(path)
    if args.from_files:
        return _show(args)
    urls = (args.url, *args.compare)
    if len(set(urls)) < len(urls):
        raise ConfigError("--compare names a server twice")
    with LeavesAtOnce():
        from alignedserve.cli.remote.bench import BenchOptions, OutputFiles, run

    args.urls, args.files = urls, OutputFiles(args.json, args.csv, args.page)
    return run(options_of(BenchOptions, args))


def _show(args: argparse.Namespace) -> int:
    if others := sorted(given(args) - {_FROM, *_WRITTEN}):
        raise ConfigError(f"{_FROM} measures nothing, so {others[0]} has no effect beside it")
    with LeavesAtOnce():
        from alignedserve.cli.remote.bench import OutputFiles, show

    return show(args.from_files, OutputFiles(args.json, args.csv, args.page))
