"""The flags of `alignedserve serve`, `presets`, `key`, `doctor` and `profile`."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from alignedserve.cli.terminal.arguments import Each, above_zero, check_writable, file, whole
from alignedserve.config.choices import LogLevel, LoraFolders, ModelNames
from alignedserve.config.config import Config, about, dump, every_setting, load, of_preset, plain, sections, settings
from alignedserve.config.presets import Preset, preset, presets
from alignedserve.config.setting import Reach, Setting, leaves
from alignedserve.config.sources import read_settings, read_yaml
from alignedserve.errors import ConfigError
from alignedserve.interrupt import remember_ctrl_c
from alignedserve.store.address import hide_secrets

# --- serve


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serves a model over an OpenAI-compatible HTTP API. A flag outweighs its environment variable "
        f"(such as {settings()['server.port'].variable}), a variable the file, the file the preset. "
        "--help shows the settings that are changed most, --help-all shows all of them."
    )
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all settings, and exit")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    add_set(parser)
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show each request and each step of the start on a terminal too; what is no terminal gets them anyway",
    )
    parser.add_argument("--print-config", action="store_true", help="print the settings as YAML, and exit")
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for setting in settings().values():
        if setting.section not in groups:
            groups[setting.section] = parser.add_argument_group(setting.section)
        action = add_setting(groups[setting.section], setting)
        if setting.reach is Reach.RARE:
            action.help = argparse.SUPPRESS
    parser.add_argument(
        "--ray", dest="launcher", action="store_const", const="ray", default=argparse.SUPPRESS, help="--launcher ray"
    )
    parser.set_defaults(run=_serve)


class _Joined(argparse.Action):
    """Joins the values of a flag that is given several times."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, *_: Any) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, value if before is None else f"{before},{value}")


class _Names(argparse.Action):
    """Stores the words behind the flag; the last of several may be the model, where nothing else names one."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, words: Any, *_: Any) -> None:
        setattr(namespace, self.dest, words)
        if len(words) > 1 and not hasattr(namespace, "last_word"):
            namespace.last_word = words[-1]


class _HelpAll(argparse.Action):
    """Prints the help with every setting in it, those too that `--help` leaves out."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        for action in parser._actions:
            if action.help == argparse.SUPPRESS and action.dest in settings():
                action.help = _help(settings()[action.dest])
        for group in parser._action_groups:
            if group.title in sections():
                group.description = about(group.title)
        parser.print_help()
        parser.exit()


def add_set(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--set",
        action=Each,
        default=(),
        metavar="PATH=VALUE",
        help="one setting by its place in the file, such as schedule.reuse=false, or one that presets are made of, "
        "such as schedule.room=growing; may be given again for another setting",
    )


def set_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return what --set says."""
    return tuple(getattr(args, "set", ()))


def add_setting(parser: argparse._ActionsContainer, setting: Setting) -> argparse.Action:
    """Add the setting's flags as it is declared, and return the action."""
    options: dict[str, Any] = {"help": _help(setting), "default": argparse.SUPPRESS}
    if setting.path == "model":
        parser.add_argument("--model", dest="named_model", metavar="MODEL", help="the same", default=argparse.SUPPRESS)
        return parser.add_argument("model", nargs="?", metavar="MODEL", **options)
    if setting.kind is LoraFolders:
        return parser.add_argument(*setting.flags, dest=setting.path, action=_Joined, metavar="NAME=FOLDER", **options)
    if setting.kind is ModelNames:
        options |= {"action": _Names, "nargs": "+", "metavar": "NAME"}
        return parser.add_argument(*setting.flags, dest=setting.path, **options)
    if setting.kind is bool:
        return parser.add_argument(*setting.flags, dest=setting.path, action=argparse.BooleanOptionalAction, **options)
    return parser.add_argument(*setting.flags, dest=setting.path, metavar=setting.placeholder, **options)


def _help(setting: Setting) -> str:
    shown = "" if setting.default is None or setting.kind is bool else f" (default: {plain(setting.default)})"
    return f"{setting.help}{shown}".replace("%", "%%")


def _serve(args: argparse.Namespace) -> int:
    if args.print_config:
        print(_yaml(config_of(args)), end="")
        return 0
    config = _served(args)
    remember_ctrl_c()
    from alignedserve.launch.launch import serve
    from alignedserve.shell.logs import never_fail_to_print

    never_fail_to_print()
    return serve(config, partial(_served, args))


def _served(args: argparse.Namespace) -> Config:
    """Return the configuration. A terminal gets warnings alone in the log, where nobody asked for more or a level."""
    config, path = config_of(args), "log.level"
    if args.verbose or not sys.stderr.isatty():
        return config
    in_file = args.config is not None and "level" in (read_yaml(args.config).get("log") or {})
    if path in vars(args) or settings()[path].variable in os.environ or in_file:
        return config
    return replace(config, log=replace(config.log, level=LogLevel.WARNING))


def config_of(args: argparse.Namespace) -> Config:
    """Return the configuration that the flags, the variables and the file give together."""
    given = {path: value for path, value in vars(args).items() if path in settings()}
    if (named := vars(args).get("named_model")) is not None and given.setdefault("model", named) != named:
        raise ConfigError(f"--model {named} and {given['model']} name two models: say one")
    if names := given.get("served_model_name"):
        if "model" not in given and (last := vars(args).get("last_word")) is not None:
            given["model"] = last
            names = names[:-1] if names[-1] == last else names
        given["served_model_name"] = ",".join(names)
    set_ = read_settings(set_of(args), "--set", every_setting())
    if twice := sorted(given.keys() & set_.keys()):
        raise ConfigError(f"--set {twice[0]} and {settings()[twice[0]].flags[0]} set the same setting twice")
    return load(given | set_, os.environ, args.config)


def _yaml(config: Config) -> str:
    """Return the settings as a file that --config takes, without the secrets. What `--set` changed of a preset is in
    comments, since a file cannot say it."""
    import yaml

    tree = dump(config, settings())
    if config.server.api_key is not None:
        tree["server"]["api_key"] = "(hidden)"
    tree["jobs"]["store"] = hide_secrets(config.jobs.store)
    tree["jobs"]["files"] = config.jobs.files and hide_secrets(config.jobs.files)
    usual = dict(leaves(of_preset(config.preset, {})))
    changed = {path: value for path, value in leaves(config) if path not in settings() and value != usual[path]}
    comments = [f"# --set {path}={str(plain(value)).lower()}\n" for path, value in changed.items()]
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True) + "".join(comments)


# --- presets


def add_presets(parser: argparse.ArgumentParser) -> None:
    """Lists the presets: what each does, where it is described, and the settings that make it."""
    parser.add_argument("name", nargs="?", metavar="PRESET", help="only this preset")
    parser.set_defaults(run=_presets_listed)


def _presets_listed(args: argparse.Namespace) -> int:
    if args.name is None:
        told = []
        for name, listed in presets().items():
            lines = (f"    {path}: {str(value).lower()}" for path, value in listed.settings.items())
            told.append("\n".join([_head(name, listed), *lines]))
        print("\n\n".join(told))
        return 0
    chosen = preset(args.name)
    print(f"{_head(args.name, chosen)}\n\n    its settings, and * where it is not the default's:")
    usual = dict(leaves(Config()))
    for path, value in leaves(of_preset(args.name, {})):
        if path.startswith("schedule.") or value != usual[path]:
            print(f"  {' ' if value == usual[path] else '*'} {path}: {str(plain(value)).lower()}")
    return 0


def _head(name: str, listed: Preset) -> str:
    differs = f"\n    not as there: {listed.differs}" if listed.differs else ""
    return f"{name} ({listed.source})\n    {listed.about}{differs}"


# --- key


def add_key(parser: argparse.ArgumentParser) -> None:
    """Makes an API key, prints it, once, and adds its hash to a file for `alignedserve serve --keys-file FILE`. To
    revoke a key, remove its entry."""
    from alignedserve.gateway.access.keys import USUAL_SCOPES, Scope

    scopes, usual = [scope.value for scope in Scope], sorted(scope.value for scope in USUAL_SCOPES)
    parser.add_argument("name", metavar="NAME", help="name of the key's owner, who has the limits, files and jobs")
    parser.add_argument(
        "--file", type=file, metavar="FILE", required=True, help="the keys file; it is made where it does not exist"
    )
    parser.add_argument(
        "--scope",
        nargs="+",
        choices=scopes,
        default=usual,
        help=f"what the key may ask for (default: {' '.join(usual)}); dashboard is the live page, metrics is /metrics",
    )
    for flag, limit in (
        ("--requests-per-minute", "most requests in a minute"),
        ("--tokens-per-minute", "most tokens of prompts and outputs in a minute"),
        ("--tokens-per-day", "most tokens in a day, UTC"),
        ("--tokens-per-month", "most tokens in a month, UTC"),
        ("--most-open", "most requests for tokens that are open at once"),
        ("--most-logprobs", "most log-probabilities of answers open at once: choices x tokens x (1 + top_logprobs)"),
        ("--least-ttft-ms", "shortest time to a first token that it may ask for"),
        ("--least-tbt-ms", "shortest time between two tokens that it may ask for"),
        ("--weight", "its part, where keys together want more than there is: 2 is twice that of others"),
    ):
        parser.add_argument(flag, type=whole(1), metavar="N", help=limit)
    parser.add_argument("--least-priority", type=int, metavar="N", help="lowest number of priority, which goes first")
    parser.set_defaults(run=_key)


def _key(args: argparse.Namespace) -> int:
    check_writable(args.file)
    from alignedserve.gateway.access.keys import Limits, Scope, make_key

    limits = Limits(**{limit.name: getattr(args, limit.name) for limit in fields(Limits)})
    print(make_key(args.file, args.name, map(Scope, args.scope), limits))
    return 0


# --- doctor


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Shows what this machine has for serving and what is missing; exits with 1 where it cannot serve."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--node", action="store_true", help="only what a node needs, in about a second: driver, compiler, memory, model"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with the settings of what is served")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from alignedserve.cli.doctor import run

    return run(args.json, args.node, args.config)


# --- profile

_SIZES = ("max_model_len", "kv_memory_mb", "max_step_tokens", "max_batch")
PROFILED = (
    "model",
    *(f"engine.{name}" for name in ("dtype", "kv_dtype", "quantization", *_SIZES, "threads")),
)  # what a profile depends on


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Measures what steps of a model take here; writes the cost model, and a plot beside it."""
    parser.usage = "%(prog)s [MODEL] --out FILE [flags]"
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="the profile; the plot is FILE.svg")
    parser.add_argument("--budget", type=above_zero, metavar="S", default=20.0, help="seconds to measure (default: 20)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    for path in PROFILED:
        add_setting(parser, settings()[path])
    parser.set_defaults(run=_profile)


def _profile(args: argparse.Namespace) -> int:
    from alignedserve.cli.profile import run

    return run(config_of(args), args.out, args.budget)
