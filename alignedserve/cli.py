"""The command line. What a command needs is imported when it runs, so that --help answers at once."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from alignedserve.arguments import (
    Each,
    Once,
    above_zero,
    all_above_zero,
    check_goes_with,
    check_writable,
    file,
    filled,
    given,
    only_one,
    whole,
    wholes,
    zero_or_more,
)
from alignedserve.config import Config, dump, load, settings
from alignedserve.config_sources import hint, read_settings
from alignedserve.errors import AlignedServeError, ConfigError
from alignedserve.interrupt import INTERRUPTED, LeavesAtOnce
from alignedserve.presets import DEFAULT, PRESETS, Preset, preset
from alignedserve.setting import Setting

_PIPE_CLOSED = 141  # what shells report for a command whose reader has gone


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = _parse(argv)
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except AlignedServeError as error:
        print(f"alignedserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _say_no_more()
        return _PIPE_CLOSED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _say_no_more()
        print(f"alignedserve: what it says cannot be written: {error.strerror}", file=sys.stderr)
        return 2


def _say_no_more() -> None:
    """What is left in its buffer would be an error again at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        wrong = unknown[0].partition("=")[0]
        flags = re.findall(r"--[a-z][a-z-]*", args.parser.format_help())
        raise ConfigError(f"{wrong} is not understood{hint(wrong, flags)} (see {args.parser.prog} --help)")
    return args


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error of ours."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


class _Version(argparse.Action):
    """Looks the version up only when asked, since that takes longer than all else here."""

    def __call__(self, *_: Any) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"alignedserve {version('alignedserve')}")
        except PackageNotFoundError:
            print("alignedserve (not installed: run from its source)")
        raise SystemExit(0)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="alignedserve", description="Serves large language models: real-time chat and batch jobs.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="command", required=True)
    _add_serve(commands.add_parser("serve", help="serve a model over an OpenAI-compatible HTTP API"))
    _add_chat(commands.add_parser("chat", help="chat with a served model in the terminal"))
    _add_status(commands.add_parser("status", help="tell what a served deployment consists of, and how it does"))
    _add_batch(commands.add_parser("batch", help="submit batch jobs, look at them, get their results"))
    _add_store(commands.add_parser("store", help="look after what is kept of files and batch jobs"))
    _add_key(commands.add_parser("key", help="make an API key, and add its hash to a keys file"))
    _add_doctor(commands.add_parser("doctor", help="tell what this machine has for serving and what it lacks"))
    _add_profile(commands.add_parser("profile", help="measure what a model's steps take on this machine"))
    _add_presets(commands.add_parser("presets", help="list the named sets of settings, and what each of them sets"))
    _add_simulate(commands.add_parser("simulate", help="run a workload through a deployment in virtual time"))
    _add_fuzz(commands.add_parser("fuzz", help="inject faults into simulated deployments, and check that all holds"))
    return parser


# --- serve


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serves a model over an OpenAI-compatible HTTP API. A flag outweighs its environment variable "
        f"(such as {settings()['server.port'].variable}), a variable the file, the file the default."
    )
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    _add_set(parser)
    parser.add_argument("--print-config", action="store_true", help="print the settings as YAML, and exit")
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for setting in settings().values():
        section = setting.path.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        _add_setting(groups[section], setting)
    parser.add_argument(
        "--ray", dest="launcher", action="store_const", const="ray", default=argparse.SUPPRESS, help="--launcher ray"
    )
    parser.set_defaults(run=_serve, parser=parser)


def _add_set(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--set",
        action=Each,
        default=(),
        metavar="PATH=VALUE",
        help="one setting by its place in the file, such as schedule.room=growing; may come again for another",
    )


def _add_setting(parser: argparse._ActionsContainer, setting: Setting) -> None:
    options: dict[str, Any] = {"help": _help(setting), "default": argparse.SUPPRESS}
    if setting.path == "model":
        parser.add_argument("model", nargs="?", metavar="MODEL", **options)
    elif setting.kind is bool:
        parser.add_argument(*setting.flags, dest=setting.path, action=argparse.BooleanOptionalAction, **options)
    else:
        parser.add_argument(*setting.flags, dest=setting.path, metavar=_metavar(setting), **options)


def _metavar(setting: Setting) -> str:
    names = {int: "N", float: "X"}
    return "|".join(setting.choices) or names.get(setting.kind, setting.path.rpartition(".")[2].upper())


def _help(setting: Setting) -> str:
    shown = "" if setting.default is None or setting.kind is bool else f" (default: {_plain(setting.default)})"
    return f"{setting.help}{shown}".replace("%", "%%")


def _plain(default: Any) -> Any:
    return getattr(default, "value", default)


def _serve(args: argparse.Namespace) -> int:
    config = _config(args)
    if args.print_config:
        print(_yaml(config), end="")
        return 0
    from alignedserve.launch import serve

    return serve(config)


def _config(args: argparse.Namespace) -> Config:
    given = {path: value for path, value in vars(args).items() if path in settings()}
    set_ = read_settings(getattr(args, "set", ()), "--set", settings())
    if twice := sorted(given.keys() & set_.keys()):
        raise ConfigError(f"--set {twice[0]} and {settings()[twice[0]].flags[0]} say the same setting twice")
    return load(given | set_, os.environ, args.config)


def _yaml(config: Config) -> str:
    """For reading, so without the secrets."""
    import yaml

    tree = dump(config)
    if config.server.api_key is not None:
        tree["server"]["api_key"] = "(hidden)"
    tree["jobs"]["store"] = re.sub(r"//[^/@]*@", "//(hidden)@", config.jobs.store)
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


# --- chat


def _add_chat(parser: argparse.ArgumentParser) -> None:
    key = settings()["server.api_key"].variable
    parser.description = (
        "Chats with any server that has an OpenAI-compatible HTTP API; piped input is one turn per line."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the API's base (default: %(default)s)")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", default=os.environ.get(key), help=f"default: {key}")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the chat")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: the server's)")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 for greedy (default: the server's)")
    parser.set_defaults(run=_chat, parser=parser)


def _chat(args: argparse.Namespace) -> int:
    from alignedserve.chat import Options, run

    return run(
        Options(
            url=args.url,
            model=args.model,
            api_key=args.api_key,
            system=args.system,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
        )
    )


# --- status


def _add_status(parser: argparse.ArgumentParser) -> None:
    key = settings()["server.api_key"].variable
    parser.description = (
        "Tells a deployment's parts, their nodes, and what is open; exits with 1 where it is not ready."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where it serves (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get(key), help=f"default: {key}")
    parser.add_argument(
        "--wait", type=zero_or_more, default=0.0, metavar="S", help="until it is ready, at most so long"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.set_defaults(run=_status, parser=parser)


def _status(args: argparse.Namespace) -> int:
    from alignedserve.status_command import Options, run

    return run(Options(url=args.url, api_key=args.api_key, wait_s=args.wait, as_json=args.json))


# --- batch


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.description = "Batch jobs on any server that has OpenAI's files and batches."
    what = parser.add_subparsers(metavar="what", required=True)
    submit = _add_batch_command(what, "submit", "upload a file of requests, and have it run")
    submit.add_argument("file", type=file, metavar="FILE", help="a request in each line, as OpenAI's batches have them")
    submit.add_argument("--window", default="24h", metavar="W", help="10m to 7d, such as 4h (default: %(default)s)")
    submit.add_argument("--endpoint", metavar="PATH", help="default: the url of the first line")
    submit.add_argument("--weight", type=above_zero, metavar="X", help="of its share beside other batches, here alone")
    submit.add_argument("--wait", action=Once, nargs=0, const=True, default=False, help="until it has ended")
    submit.add_argument("--out", action=Once, type=file, metavar="FILE", help="with --wait: its results")
    submit.set_defaults(run=_batch_submit)
    status = _add_batch_command(what, "status", "how a batch gets on")
    status.add_argument("id", metavar="ID")
    status.set_defaults(run=_batch_status)
    listed = _add_batch_command(what, "list", "the newest batches")
    listed.add_argument("--limit", type=whole(1), default=20, metavar="N", help="at most (default: %(default)s)")
    listed.set_defaults(run=_batch_list)
    cancel = _add_batch_command(what, "cancel", "end a batch with what is done")
    cancel.add_argument("id", metavar="ID")
    cancel.set_defaults(run=_batch_cancel)
    download = _add_batch_command(what, "download", "the results of a batch, and its errors beside them")
    download.add_argument("id", metavar="ID")
    download.add_argument("out", type=file, metavar="FILE", help="errors go to FILE with .errors before its suffix")
    download.set_defaults(run=_batch_download)


def _add_batch_command(what: Any, name: str, about: str) -> argparse.ArgumentParser:
    key = settings()["server.api_key"].variable
    parser: argparse.ArgumentParser = what.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the API's base (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get(key), help=f"default: {key}")
    parser.set_defaults(parser=parser)
    return parser


def _batch_submit(args: argparse.Namespace) -> int:
    check_goes_with(args, "--out", ("--wait",), given(args))
    if args.out is not None:
        check_writable(args.out)
    from alignedserve.batch_command import Options, Submission, submit

    asked = Submission(args.file, args.window, args.endpoint, args.weight, args.wait, args.out)
    return submit(Options(args.url, args.api_key), asked)


def _batch_status(args: argparse.Namespace) -> int:
    from alignedserve.batch_command import Options, status

    return status(Options(args.url, args.api_key), args.id)


def _batch_list(args: argparse.Namespace) -> int:
    from alignedserve.batch_command import Options, listed

    return listed(Options(args.url, args.api_key), args.limit)


def _batch_cancel(args: argparse.Namespace) -> int:
    from alignedserve.batch_command import Options, cancel

    return cancel(Options(args.url, args.api_key), args.id)


def _batch_download(args: argparse.Namespace) -> int:
    check_writable(args.out)
    from alignedserve.batch_command import Options, download

    return download(Options(args.url, args.api_key), args.id, args.out)


# --- store


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Looks after files and batch jobs that are kept, where `serve` with the same settings keeps them."
    )
    what = parser.add_subparsers(metavar="what", required=True)
    check = what.add_parser("check", help="tell what the store guarantees and holds, and what is wrong with it")
    check.description = "Tells what the store guarantees and holds; exits with 1 where something is missing."
    check.set_defaults(run=_store_check)
    export = what.add_parser("export", help="write all records to a file")
    export.description = "Writes all records to a file, one in a line of JSON; a backup has the files' bytes besides."
    export.add_argument("out", type=file, metavar="FILE")
    export.set_defaults(run=_store_export)
    for one in (check, export):
        one.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
        for setting in settings().values():
            if setting.path in ("jobs.store", "jobs.directory", "jobs.files", "jobs.key_prefix"):
                _add_setting(one, setting)
        one.set_defaults(parser=one)


def _store_check(args: argparse.Namespace) -> int:
    from alignedserve.store_command import Options, check

    return check(Options(_config(args).jobs))


def _store_export(args: argparse.Namespace) -> int:
    check_writable(args.out)
    from alignedserve.store_command import Options, export

    return export(Options(_config(args).jobs), args.out)


# --- key


def _add_key(parser: argparse.ArgumentParser) -> None:
    from alignedserve.keys import Scope

    scopes = [one.value for one in Scope]
    parser.description = (
        "Makes an API key, prints it, once, and adds its hash to a file for `alignedserve serve --keys-file FILE`. "
        "To take a key back, remove its entry."
    )
    parser.add_argument("name", metavar="NAME", help="whose key it is: of limits, files and jobs")
    parser.add_argument("--file", type=Path, metavar="FILE", required=True, help="made where it is not there")
    parser.add_argument(
        "--scope", nargs="+", choices=scopes, default=scopes, help="what it may ask for (default: all of it)"
    )
    for flag, of in (
        ("--requests-per-minute", "most requests in a minute"),
        ("--tokens-per-minute", "most tokens of prompts and outputs in a minute"),
        ("--most-open", "most requests for tokens that are open at once"),
    ):
        parser.add_argument(flag, type=whole(1), metavar="N", help=of)
    parser.set_defaults(run=_key, parser=parser)


def _key(args: argparse.Namespace) -> int:
    from alignedserve.keys import Limits, Scope, make_key

    limits = Limits(args.requests_per_minute, args.tokens_per_minute, args.most_open)
    print(make_key(args.file, args.name, map(Scope, args.scope), limits))
    return 0


# --- doctor


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Tells what was found for serving and what is missing; exits with 1 where it cannot serve."
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=_doctor, parser=parser)


def _doctor(args: argparse.Namespace) -> int:
    from alignedserve.doctor import run

    return run(as_json=args.json)


# --- profile


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measures what steps of a model take here; writes the cost model, and a plot beside it."
    parser.usage = "%(prog)s [MODEL] --out FILE [flags]"
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="the profile; the plot is FILE.svg")
    parser.add_argument("--budget", type=float, metavar="S", default=20.0, help="seconds to measure (default: 20)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    for setting in settings().values():
        if setting.path == "model" or setting.path.startswith("engine."):
            _add_setting(parser, setting)
    parser.set_defaults(run=_profile, parser=parser)


def _profile(args: argparse.Namespace) -> int:
    from alignedserve.profile_command import Options, run

    return run(Options(_config(args), args.out, args.budget))


# --- presets


def _add_presets(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists the presets: what each does, where that is described, and the settings that make it."
    parser.add_argument("name", nargs="?", metavar="PRESET", help="only this one")
    parser.set_defaults(run=_presets_listed, parser=parser)


def _presets_listed(args: argparse.Namespace) -> int:
    some = PRESETS if args.name is None else {args.name: preset(args.name)}
    print("\n\n".join(_explained(name, one) for name, one in some.items()))
    return 0


def _explained(name: str, one: Preset) -> str:
    lines = [f"    {path}: {str(value).lower()}" for path, value in one.options.items()]
    return "\n".join([f"{name} ({one.of})", f"    {one.about}", *lines])


# --- simulate

_REPLAY, _DIFF = "--replay", "--diff"


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [flags]\n       %(prog)s --replay FILE\n       %(prog)s --diff FILE FILE"
    parser.description = (
        "Runs a workload through a whole deployment in virtual time, without a model or a GPU, and prints the figures. "
        "Several presets, seeds or rates are compared: each figure is a mean over the seeds and half its range. "
        "All figures, workloads and files are in docs/simulator.md and docs/workloads.md."
    )
    _add_what_runs(parser.add_argument_group("what runs"))
    _add_what_is_written(parser.add_argument_group("what is written besides"))
    _add_saved(parser.add_argument_group("runs that --save has written, alone"))
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
    _add_set(group)
    group.add_argument(
        "--compare", action=Once, nargs="+", metavar="P", help="two presets or more, over the same arrivals"
    )
    group.add_argument(
        "--workload",
        action=Once,
        type=filled,
        metavar="W",
        default="chat",
        help="who asks for what, and when: a name such as chat or coserve, a file, or a kind such as "
        "trace:FILE, each with ,KEY=VALUE behind it (default: %(default)s)",
    )
    group.add_argument(
        "--cluster",
        action=Once,
        metavar="C",
        help="workers: colocated, 4xcolocated, or prefill+decode such as 1+1 (default: as the presets say)",
    )
    group.add_argument(
        "--seed", action=Once, type=whole(0), metavar="N", default=0, help="of all chance (default: %(default)s)"
    )
    group.add_argument("--seeds", action=Once, type=wholes(0), metavar="N,N", help="a run for each")
    group.add_argument(
        "--rates",
        action=Once,
        type=all_above_zero,
        metavar="X,X",
        help="arrivals in a second, in place of the workload's: a run for each",
    )
    group.add_argument(
        "--profile",
        action=Once,
        type=filled,
        metavar="GPU",
        default="rtxpro6000-llama-3.1-8b-tp1",
        help="what work takes: the name of a measured GPU, or a file of `alignedserve profile` (default: %(default)s)",
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
        help="what a request takes besides its steps and the parts' frames: HTTP, templates, tokens (default: 0)",
    )


def _add_what_is_written(group: argparse._ArgumentGroup) -> None:
    add = partial(group.add_argument, action=Once, type=file)
    add("--out", metavar="FOLDER", help="everything below but the record, in files there")
    add("--json", metavar="FILE", help="all figures of all runs")
    add("--csv", metavar="FILE", help="rows of requests, and of steps in NAME-steps.csv; of several runs a row each")
    add("--plot", metavar="FILE", help="a .png or .svg (needs matplotlib: the extra `simulate`)")
    add("--timeline", metavar="FILE", help="a trace for ui.perfetto.dev, of a single run")
    add("--record", metavar="FILE", help="what happened in a single run, as JSON: what all figures are made of")
    add("--save", metavar="FILE", help="every command of every part in a single run, for --replay and --diff")
    group.add_argument(
        "--timeline-limit",
        action=Once,
        type=above_zero,
        metavar="S",
        default=inf,
        help="what of a timeline begins in the first S seconds",
    )


def _add_saved(group: argparse._ArgumentGroup) -> None:
    group.add_argument(_REPLAY, action=Once, type=file, metavar="FILE", help="a saved run again: is it the same?")
    group.add_argument(
        _DIFF, action=Once, type=file, nargs=2, metavar="FILE", help="no run: the first difference of two saved ones"
    )


def _simulate(args: argparse.Namespace) -> int:
    if (mode := only_one(args, _REPLAY, _DIFF)) is not None:
        return _simulate_saved(args, mode)
    only_one(args, "--preset", "--compare")
    only_one(args, "--seed", "--seeds")
    check_goes_with(args, "--timeline-limit", ("--timeline", "--out"), given(args))

    with LeavesAtOnce():
        from alignedserve.simulate_command import Options, run
        from alignedserve.simulate_once import cluster_of
        from alignedserve.simulator.trial import Trial

    presets = _presets(args)
    return run(
        Options(
            common=Trial(
                args.preset,
                args.workload,
                args.cluster or cluster_of(presets),
                profile=args.profile,
                direct=None if args.transport is None else args.transport == "direct",
                options=args.set,
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
        )
    )


def _simulate_saved(args: argparse.Namespace, mode: str) -> int:
    if others := sorted(given(args) - {mode}):
        raise ConfigError(f"{mode} goes with no other flag, such as {others[0]}: a saved run says what was run")
    with LeavesAtOnce():
        from alignedserve.simulate_command import diff, replay

    return diff(*args.diff) if mode == _DIFF else replay(args.replay)


def _presets(args: argparse.Namespace) -> tuple[str, ...]:
    if args.compare is None:
        return (args.preset,)
    if len(args.compare) < 2:
        raise ConfigError(
            f"--compare takes two presets or more, such as fcfs aligned: {args.compare[0]!r:.40} alone is --preset"
        )
    if len(set(args.compare)) < len(args.compare):
        raise ConfigError(f"--compare {' '.join(args.compare)} names one of them twice")
    return tuple(args.compare)


# --- fuzz

_SEEDS, _ENDLESS, _ONE = "--seeds", "--until-failure", "--seed"
_FUZZ_GOES_WITH = {
    "--start": (_SEEDS, _ENDLESS),
    "--jobs": (_SEEDS, _ENDLESS),
    "--save": (_SEEDS, _ENDLESS, _ONE),
}


def _add_fuzz(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [--seeds N | --until-failure]\n"
        "                         [--start S] [--jobs J] [--save FILE]\n"
        "       %(prog)s --seed N [--save FILE]\n"
        "       %(prog)s --replay FILE\n"
        "       %(prog)s --diff FILE FILE"
    )
    parser.description = (
        "Injects faults that follow from seeds into simulated deployments, and checks what must hold after every "
        "event. Exits with 1 where a seed fails, or where runs that are compared differ."
    )
    what = parser.add_argument_group("what to run")
    what.add_argument(
        _SEEDS, action=Once, type=whole(1), metavar="N", default=200, help="so many seeds (default: %(default)s)"
    )
    what.add_argument(
        _ENDLESS, action=Once, nargs=0, const=True, default=False, help="seeds without end, until one fails"
    )
    what.add_argument(
        _ONE, action=Once, type=whole(0), metavar="N", help="this seed alone, and show what happens in it"
    )
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
        help="the run of --seed; of many, the first that fails, shrunk",
    )
    parser.set_defaults(run=_fuzz, parser=parser)


def _fuzz(args: argparse.Namespace) -> int:
    mode = only_one(args, _SEEDS, _ENDLESS, _ONE, _REPLAY, _DIFF) or _SEEDS
    for flag, modes in _FUZZ_GOES_WITH.items():
        check_goes_with(args, flag, modes, (mode,))
    if mode == _SEEDS and args.jobs > args.seeds:
        raise ConfigError(f"--jobs {args.jobs} is more than there are seeds, --seeds {args.seeds}")

    with LeavesAtOnce():
        from alignedserve.fuzz_command import Options, run

    return run(
        Options(
            seeds=args.seeds,
            start=args.start,
            jobs=args.jobs,
            until_failure=args.until_failure,
            seed=args.seed,
            save=args.save,
            replay=args.replay,
            diff=tuple(args.diff) if args.diff else None,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
