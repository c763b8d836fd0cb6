"""The flags of `alignedserve bench`, each declared once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from alignedserve.cli.remote.options import HERE, add_ca, add_key
from alignedserve.cli.terminal.arguments import (
    above_zero,
    add_flags,
    check_writable,
    file,
    filled,
    flag,
    flag_of,
    flags_of,
    given,
    switch,
    whole,
)
from alignedserve.errors import ConfigError
from alignedserve.interrupt import LeavesAtOnce
from alignedserve.lab.loads import defaults


@dataclass(frozen=True)
class BenchOptions:
    url: str = flag(None, "its address (default: %(default)s)", HERE, type=filled, group="the server")
    compare: tuple[str, ...] = flag(
        "URL", "more servers, which are asked the same in turns", (), nargs="+", type=filled
    )
    model: str | None = flag(None, "default: the first model that a server lists", type=filled)
    api_key: str | None = flag_of(add_key)
    ca: Path | None = flag_of(add_ca)
    workload: str = flag(
        "W",
        "which requests come, when, and what they are promised: a name such as chat or coserve, a file, or a kind such "
        "as trace:FILE, each with ,KEY=VALUE behind it (default: %(default)s)",
        defaults.WORKLOAD,
        type=filled,
        group="the load",
    )
    seed: int = flag("N", "of lengths and times (default: %(default)s)", 0, type=whole(0))
    chat: bool = switch("ask /chat/completions with words, in place of /completions with token ids")
    batch: bool = switch(
        "best-effort requests are the lines of one batch job, in place of requests with service_tier flex"
    )
    rounds: int = flag(
        "N", "run N loads on each server in turns, each with its own seed (default: %(default)s)", 1, type=whole(1)
    )
    warm_up: int = flag(
        "N", "first ask N requests of each stream that do not count (default: %(default)s)", 4, type=whole(0)
    )
    timeout: float = flag(
        "S", "a request ends when its server is silent for so long (default: %(default)g)", 600.0, type=above_zero
    )
    disclose: tuple[str, ...] | None = flag(
        "NAME=TEXT",
        "print the nine facts that Red Hat's suite has every report disclose; of precision, quantization and images "
        "(what the server runs) it knows what is written here",
        nargs="*",
        type=filled,
    )
    json: Path | None = flag("FILE", "all figures, and when each token came", type=file, group="files that are written")
    csv: Path | None = flag("FILE", "a row for each request", type=file)
    page: Path | None = flag("FILE", "a page of HTML with a table and plots", type=file)
    runs: tuple[Path, ...] = flag(
        "RUN",
        "files of --json, whose runs are shown and written in place of measuring",
        (),
        nargs="+",
        type=file,
        name="--from",
    )

    @property
    def urls(self) -> tuple[str, ...]:
        return self.url, *self.compare


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
