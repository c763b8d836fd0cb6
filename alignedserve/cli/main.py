"""The command line. A command is imported when it is the one to run, and imports what it needs when it runs, so that
--help answers at once."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Collection, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn, cast

from alignedserve import LAB, NO_LAB
from alignedserve.errors import AlignedServeError, ConfigError
from alignedserve.interrupt import INTERRUPTED

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
    words = list(sys.argv[1:] if argv is None else argv)
    names = command_names()
    if words and not words[0].startswith("-") and words[0] not in names:
        from alignedserve.cli.foreign import COMMANDS
        from alignedserve.config.sources import hint

        known = f": {COMMANDS[words[0]]}" if words[0] in COMMANDS else ""
        meant = known or hint(words[0], names) or f": there are {', '.join(names)}"
        raise ConfigError(f"{words[0]!r:.40} is no command{meant} (see alignedserve --help)")
    chosen = next((word for word in words if not word.startswith("-")), None)
    args, unknown = parser_of(chosen).parse_known_args(words)
    if unknown:
        wrong = unknown[0].partition("=")[0]
        flags = [flag for flag in args.parser._option_string_actions if flag.startswith("--")]
        raise ConfigError(f"{wrong} is not understood{_meant(wrong, flags)} (see {args.parser.prog} --help)")
    return args


def _meant(wrong: str, flags: Sequence[str]) -> str:
    """Return a question for the flag that was probably meant, or how to say a setting that has no flag."""
    from alignedserve.cli.foreign import meant_by
    from alignedserve.config.config import every_setting
    from alignedserve.config.setting import Reach
    from alignedserve.config.sources import hint

    for path, setting in every_setting().items():
        if setting.reach is Reach.EXPERIMENT and setting.flag in (wrong, wrong.replace("--no-", "--")):
            return f": choose a preset, or say --set {path}=VALUE"
    return meant_by(wrong) or hint(wrong, flags)


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


def command_names() -> list[str]:
    return [*_COMMANDS, *_LAB]


def parser_of(*chosen: str | None) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the flags of the chosen ones alone: they take longer than all else."""
    parser = _Parser(prog="alignedserve", description="Serves large language models: real-time chat and batch jobs.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, (module, purpose) in _COMMANDS.items():
        if name in chosen:
            _add(commands, name, f"alignedserve.cli.{module}", purpose)
        else:
            commands.add_parser(name, help=purpose)
    _add_lab(commands, chosen)
    return parser


def _add(commands: Any, name: str, module: str, purpose: str) -> None:
    """Add a command. The docstring of the function that adds its flags describes it, unless that sets another text."""
    add = getattr(import_module(module), f"add_{name}")
    parser = commands.add_parser(name, help=purpose, description=add.__doc__)
    add(parser)
    parser.set_defaults(parser=parser)


# The module with a command's flags, and what the command is for.
_COMMANDS = {
    "serve": ("serving", "serve a model over an OpenAI-compatible HTTP API"),
    "chat": ("clients", "chat with a served model in the terminal"),
    "status": ("clients", "show the parts of a deployment and its open requests"),
    "explain": ("clients", "tell what happened to a request, and why"),
    "scale": ("clients", "change how many workers a deployment has, while it serves"),
    "reload": ("clients", "take new keys, certificates and settings, while it serves"),
    "restart": ("clients", "replace all processes one by one, while it serves"),
    "stop": ("clients", "stop what is served on this machine"),
    "batch": ("clients", "submit batch jobs, follow them, download their results"),
    "store": ("clients", "check or export the store of files and batch jobs"),
    "key": ("serving", "make an API key, and add its hash to a keys file"),
    "doctor": ("serving", "show what this machine has for serving and what it lacks"),
    "profile": ("serving", "measure what a model's steps take on this machine"),
    "presets": ("serving", "list the presets, and the settings of each"),
    "completion": ("completion", "print what makes a shell complete commands and flags"),
}


# Likewise the lab's commands (lab/cli).
_LAB = {
    "bench": ("commands", "put a load on any OpenAI-compatible server, and measure it"),
    "simulate": ("commands", "run a workload through a deployment in virtual time"),
    "promise": ("commands", "show what people get who ask at once, before anything is served"),
    "plan": ("commands", "find the cheapest deployment that keeps its promises, by simulations"),
    "reproduce": ("commands", "run the figures of papers, beside what the papers say"),
    "fuzz": ("commands", "inject faults into simulated deployments, and check their invariants"),
}


def _add_lab(commands: Any, chosen: Collection[str | None]) -> None:
    """Add the lab's commands by name: the product imports nothing of the lab, and runs without it."""
    is_missing = find_spec(LAB) is None
    for name, (module, purpose) in _LAB.items():
        if name not in chosen:
            commands.add_parser(name, help=purpose)
        elif is_missing:  # a command that takes any words, and says what to install
            parser = commands.add_parser(name, help=purpose, add_help=False, prefix_chars="\0")
            parser.add_argument("words", nargs="*")
            parser.set_defaults(run=partial(_say_what_to_install, name), parser=parser)
        else:
            _add(commands, name, f"{LAB}.cli.{module}", purpose)


def _say_what_to_install(name: str, _: argparse.Namespace) -> NoReturn:
    raise ConfigError(f"{name} {NO_LAB}")


if __name__ == "__main__":
    sys.exit(main())
