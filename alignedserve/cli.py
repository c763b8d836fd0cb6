"""The command line. What a command needs is imported when it runs, so that --help answers at once."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from alignedserve.config import Config, dump, load, settings
from alignedserve.config_sources import hint
from alignedserve.errors import AlignedServeError, ConfigError
from alignedserve.setting import Setting

_INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended
_PIPE_CLOSED = 141  # and for one whose reader has gone


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
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to be said at the exit
        return _PIPE_CLOSED


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
    _add_doctor(commands.add_parser("doctor", help="tell what this machine has for serving and what it lacks"))
    _add_profile(commands.add_parser("profile", help="measure what a model's steps take on this machine"))
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
    return load(given, os.environ, args.config)


def _yaml(config: Config) -> str:
    """For reading, so without the secrets."""
    import yaml

    tree = dump(config)
    if config.server.api_key is not None:
        tree["server"]["api_key"] = "(hidden)"
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


# --- simulate


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a workload through a whole deployment in virtual time, without a model or a GPU, and prints the figures. "
        "Several presets, seeds or rates are compared: each figure is a mean over the seeds and half its range."
    )
    runs = parser.add_argument_group("what runs")
    presets = runs.add_mutually_exclusive_group()
    presets.add_argument("--preset", metavar="P", default="fcfs", help="how is scheduled (default: %(default)s)")
    presets.add_argument("--compare", nargs="+", metavar="P", help="these presets, over the same arrivals")
    runs.add_argument(
        "--workload", metavar="W", default="chat", help="who asks for what, and when (default: %(default)s)"
    )
    runs.add_argument(
        "--cluster",
        metavar="C",
        default="colocated",
        help="workers: colocated, 4xcolocated, or prefill+decode such as 1+1",
    )
    seeds = runs.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, metavar="N", default=0, help="of all chance (default: %(default)s)")
    seeds.add_argument("--seeds", type=_list_of(int), metavar="N,N", help="a run for each")
    runs.add_argument("--rates", type=_list_of(_rate), metavar="X,X", help="arrivals in a second: a run for each")
    runs.add_argument(
        "--profile",
        metavar="NAME|FILE",
        default="rtxpro6000-llama-3.1-8b-tp1",
        help="what work takes: a measured GPU, or a file of `alignedserve profile` (default: %(default)s)",
    )
    out = parser.add_argument_group("what is written besides")
    out.add_argument("--out", type=Path, metavar="FOLDER", help="everything below but the record, in files there")
    out.add_argument("--json", type=Path, metavar="FILE", help="all figures of all runs")
    out.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="rows of requests, and of steps in NAME-steps.csv; of several runs a row each",
    )
    out.add_argument("--plot", type=Path, metavar="FILE", help="a .png or .svg (needs the extra `simulate`)")
    out.add_argument("--timeline", type=Path, metavar="FILE", help="a trace for ui.perfetto.dev, of a single run")
    out.add_argument("--timeline-limit", type=_rate, metavar="S", default=inf, help="of it, the first S seconds")
    out.add_argument("--save", type=Path, metavar="FILE", help="the whole record of a single run, as JSON")
    parser.set_defaults(run=_simulate, parser=parser)


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            values = tuple(kind(one) for one in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r:.60} is not a list such as 1,2,3") from None
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r:.60} names one of them twice")
        return values

    return parse


def _rate(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not 0 < value < inf:
        raise ValueError(text)
    return value


def _simulate(args: argparse.Namespace) -> int:
    from alignedserve.simulate_command import Options, run
    from alignedserve.simulator.trial import Trial

    return run(
        Options(
            common=Trial(args.preset, args.workload, args.cluster, profile=args.profile),
            presets=tuple(dict.fromkeys(args.compare or [args.preset])),
            seeds=args.seeds or (args.seed,),
            rates=args.rates or (),
            out=args.out,
            json=args.json,
            csv=args.csv,
            plot=args.plot,
            timeline=args.timeline,
            timeline_s=args.timeline_limit,
            save=args.save,
        )
    )


# --- fuzz


def _add_fuzz(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Injects faults that follow from seeds into simulated deployments, and checks what must hold after every "
        "event. Exits with 1 where a seed fails, or where runs that are compared differ."
    )
    what = parser.add_argument_group("what to run").add_mutually_exclusive_group()
    what.add_argument("--seeds", type=int, metavar="N", default=200, help="so many seeds (default: %(default)s)")
    what.add_argument("--until-failure", action="store_true", help="seeds without end, until one fails")
    what.add_argument("--seed", type=int, metavar="N", help="this seed alone, and show what happens in it")
    what.add_argument("--replay", type=Path, metavar="FILE", help="a saved run, and say whether it is the same")
    what.add_argument(
        "--diff", type=Path, nargs=2, metavar="FILE", help="no run: the first difference of two saved ones"
    )
    parser.add_argument("--start", type=int, metavar="S", default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, metavar="J", default=1, help="processes (default: %(default)s)")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="save the run of --seed, or of the first failure, shrunk"
    )
    parser.set_defaults(run=_fuzz, parser=parser)


def _fuzz(args: argparse.Namespace) -> int:
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
