"""The flags of the lab's commands, each declared once."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

from alignedserve.cli.remote.options import HERE, add_ca, add_key
from alignedserve.cli.serving import add_set
from alignedserve.cli.terminal.arguments import (
    Each,
    above_zero,
    all_above_zero,
    file,
    filled,
    flag,
    flag_of,
    share,
    switch,
    whole,
    wholes,
    zero_or_more,
)
from alignedserve.config.presets import DEFAULT, presets
from alignedserve.lab.loads import defaults

_JOBS = flag("J", "processes that share several runs (default: as many as cores)", type=whole(1))


@dataclass(frozen=True)
class RunFlags:
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
class OutputFlags:
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


@dataclass(frozen=True)
class WhatIsReproduced:
    """The flags of `reproduce`."""

    figure: str | None = flag("N,N", "some of the paper's figures (default: all)", type=filled)
    seeds: tuple[int, ...] = flag("N,N", "a run for each seed (default: 0,1,2)", (0, 1, 2), type=wholes(0))
    full: bool = switch("the papers' own sizes, which take hours")
    jobs: int | None = _JOBS
    out: Path | None = flag("FOLDER", "folder for a page, pictures and JSON", type=file)


@dataclass(frozen=True)
class FuzzFlags(WhatIsSaved):
    """The flags of `fuzz`."""

    seeds: int = flag("N", "how many seeds (default: %(default)s)", 200, type=whole(1), group="what to run")
    until_failure: bool = switch("run seeds without end, until a seed fails")
    seed: int | None = flag("N", "run this seed alone, and show what happens in it", type=whole(0))
    start: int = flag("S", "the first seed (default: %(default)s)", 0, type=whole(0), group="of many seeds")
    jobs: int = flag("J", "processes (default: %(default)s)", 1, type=whole(1))
    save: Path | None = flag(
        "FILE", "the run of --seed, or the first of many seeds that fails, shrunk", type=file, group="what is written"
    )


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
