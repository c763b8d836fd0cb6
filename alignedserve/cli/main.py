"""The command line. A command imports what it needs when it runs, so that --help answers at once."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn, cast

from alignedserve import LAB, NO_LAB
from alignedserve.cli.clients import (
    add_batch,
    add_bench,
    add_chat,
    add_explain,
    add_reload,
    add_restart,
    add_scale,
    add_status,
    add_stop,
    add_store,
)
from alignedserve.cli.serving import add_doctor, add_key, add_presets, add_profile, add_serve
from alignedserve.cli.terminal.interrupt import INTERRUPTED
from alignedserve.config.config import every_setting
from alignedserve.config.setting import Reach
from alignedserve.config.sources import hint
from alignedserve.errors import AlignedServeError, ConfigError

_PIPE_CLOSED = 141  # the status that shells report where the reader of the output has gone


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
        print(f"alignedserve: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2


def _say_no_more() -> None:
    """Drop what is left in the buffer of stdout: writing it at the exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    # pyrefly: ignore[missing-attribute]
    names = [name for action in parser._subparsers._group_actions for name in action.choices]
    if words and not words[0].startswith("-") and words[0] not in names:
        meant = hint(words[0], names) or f": there are {', '.join(names)}"
        raise ConfigError(f"{words[0]!r:.40} is no command{meant} (see alignedserve --help)")
    args, unknown = parser.parse_known_args(words)
    if unknown:
        wrong = unknown[0].partition("=")[0]
        flags = [flag for flag in args.parser._option_string_actions if flag.startswith("--")]
        raise ConfigError(f"{wrong} is not understood{_meant(wrong, flags)} (see {args.parser.prog} --help)")
    return args


def _meant(wrong: str, flags: Sequence[str]) -> str:
    """Return a question for the flag that was probably meant, or how to say a setting that has no flag."""
    for path, setting in every_setting().items():
        if setting.reach is Reach.EXPERIMENT and setting.flag in (wrong, wrong.replace("--no-", "--")):
            return f": choose a preset, or say --set {path}=VALUE"
    return hint(wrong, flags)


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong in one line, as all our errors are."""

    def __init__(self, **options: Any) -> None:
        formatter = partial(argparse.HelpFormatter, max_help_position=34)
        super().__init__(allow_abbrev=False, formatter_class=cast(Any, formatter), **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


class _Version(argparse.Action):
    """Looks the version up only when it is asked for, since that takes longer than everything else here."""

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
    for name, (add, purpose) in _COMMANDS.items():
        _add(commands, name, add, purpose)
    _add_lab(commands)
    return parser


def _add(commands: Any, name: str, add: Callable[[argparse.ArgumentParser], None], purpose: str) -> None:
    """Add a command. The docstring of the function that adds its flags describes it, unless that sets another text."""
    parser = commands.add_parser(name, help=purpose, description=add.__doc__)
    add(parser)
    parser.set_defaults(parser=parser)


_COMMANDS = {
    "serve": (add_serve, "serve a model over an OpenAI-compatible HTTP API"),
    "chat": (add_chat, "chat with a served model in the terminal"),
    "status": (add_status, "show the parts of a deployment and its open requests"),
    "explain": (add_explain, "tell what happened to a request, and why"),
    "scale": (add_scale, "change how many workers a deployment has, while it serves"),
    "reload": (add_reload, "take new keys, certificates and settings, while it serves"),
    "restart": (add_restart, "replace all processes one by one, while it serves"),
    "stop": (add_stop, "stop what is served on this machine"),
    "batch": (add_batch, "submit batch jobs, follow them, download their results"),
    "bench": (add_bench, "put a load on any OpenAI-compatible server, and measure it"),
    "store": (add_store, "check or export the store of files and batch jobs"),
    "key": (add_key, "make an API key, and add its hash to a keys file"),
    "doctor": (add_doctor, "show what this machine has for serving and what it lacks"),
    "profile": (add_profile, "measure what a model's steps take on this machine"),
    "presets": (add_presets, "list the presets, and the settings of each"),
}


# The lab's commands (lab/cli): the module with a command's flags, and what the command is for.
_LAB = {
    "simulate": ("simulating", "run a workload through a deployment in virtual time"),
    "plan": ("simulating", "find the cheapest deployment that keeps its promises, by simulations"),
    "reproduce": ("simulating", "run the figures of papers, beside what the papers say"),
    "fuzz": ("simulating", "inject faults into simulated deployments, and check their invariants"),
}


def _add_lab(commands: Any) -> None:
    """Add the lab's commands by name: the product imports nothing of the lab, and runs without it."""
    is_missing = find_spec(LAB) is None
    for name, (module, purpose) in _LAB.items():
        if is_missing:  # a command that takes any words, and says what to install
            parser = commands.add_parser(name, help=purpose, add_help=False, prefix_chars="\0")
            parser.add_argument("words", nargs="*")
            parser.set_defaults(run=partial(_say_what_to_install, name), parser=parser)
        else:
            add = getattr(import_module(f"{LAB}.cli.{module}"), f"add_{name}")
            _add(commands, name, add, purpose)


def _say_what_to_install(name: str, _: argparse.Namespace) -> NoReturn:
    raise ConfigError(f"{name} {NO_LAB}")


if __name__ == "__main__":
    sys.exit(main())
