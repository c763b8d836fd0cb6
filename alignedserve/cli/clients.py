"""The commands that talk to a server or look after its store: chat, status, explain, stop, scale, reload, restart,
batch, store. Each imports what it needs when it runs; the flags of most are declared in remote/options.py."""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from alignedserve.cli.remote.options import (
    BatchOptions,
    BatchSubmission,
    ChatOptions,
    ExplainOptions,
    StatusOptions,
)
from alignedserve.cli.serving import add_setting, config_of
from alignedserve.cli.terminal.arguments import (
    add_flags,
    check_goes_with,
    check_writable,
    file,
    flags_of,
    given,
    only_one,
    whole,
)
from alignedserve.config.config import settings
from alignedserve.errors import ConfigError


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Chats with any server that has an OpenAI-compatible HTTP API; each line of piped input is a turn."""
    add_flags(parser, ChatOptions)
    parser.set_defaults(run=partial(_ask, "chat", ChatOptions))


def _ask(command: str, declared: type, args: argparse.Namespace) -> int:
    """Run the module of the command in remote/ with its flags."""
    run = import_module(f"alignedserve.cli.remote.{command}").run
    return int(run(flags_of(args, declared)))


def add_status(parser: argparse.ArgumentParser) -> None:
    """Shows a deployment's parts, their nodes and the open requests; exits with 1 where it is not ready."""
    add_flags(parser, StatusOptions)
    parser.set_defaults(run=partial(_ask, "status", StatusOptions))


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Tells where a request waited, for how long and for whom, what ran it, and why it was refused. Parts remember the
    last minutes, and tell only the key that sent the request."""
    add_flags(parser, ExplainOptions)
    parser.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    only_one(args, "--json", "--perfetto")
    if args.perfetto is not None:
        check_writable(args.perfetto)
    return _ask("explain", ExplainOptions, args)


# --- stop, scale, reload, restart


def add_stop(parser: argparse.ArgumentParser) -> None:
    """Stops the deployment that you serve on this machine, as Ctrl-C would: open requests go on for server.drain_s. On
    a cluster run it on the head."""
    parser.add_argument(
        "--launcher",
        action="store_true",
        help="end the launcher alone: what it started serves on for 60 s, and `serve` goes on with that",
    )
    _add_port(parser)
    parser.set_defaults(run=_stop)


def add_scale(parser: argparse.ArgumentParser) -> None:
    """Changes how many workers a deployment has, while it serves. New workers are used once they are ready; workers
    that leave take nothing new and end when they have no request, or after server.drain_s: open requests then go on
    elsewhere. Run it where `alignedserve serve` runs, as the same user."""
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill workers (default: as many as there are)")
    parser.add_argument("--decode", type=int, metavar="N", help="decode workers (default: as many as there are)")
    _add_port(parser)
    parser.set_defaults(run=_scale)


def add_reload(parser: argparse.ArgumentParser) -> None:
    taken = ", ".join(path for path, setting in settings().items() if setting.reloads)
    parser.description = (
        "Has the deployment that you serve on this machine read its settings again while it serves: keys, certificate "
        f"and the file of --config. These may change: {taken}. Where another has changed or a file is wrong, nothing "
        "is taken, and the command says why. SIGHUP to `alignedserve serve` does the same, where it has no terminal."
    )
    _add_port(parser)
    parser.set_defaults(run=lambda args: _order(args.port, reload=True))


def add_restart(parser: argparse.ArgumentParser) -> None:
    """Replaces the processes of the deployment that you serve on this machine one after another, while the others
    serve. A gateway and a worker end when the next one runs and nothing is left there, or after server.drain_s: no
    stream of that length breaks. The others end and come again, and streams go on. Ctrl-C ends it after the process in
    turn; exits with 2 where not all are replaced. On a cluster run it on the head."""
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="end each worker before the next one starts, where there is no memory for both: streams wait meanwhile",
    )
    _add_port(parser)
    parser.set_defaults(run=_restart)


def _add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port",
        type=int,
        default=settings()["server.port"].default,
        help="port that it serves on (default: %(default)s)",
    )


def _stop(args: argparse.Namespace) -> int:
    from alignedserve.shell.control import ControlError

    if args.launcher:
        return _order(args.port, leave=True)
    try:
        return _order(args.port, stop=True)
    except ControlError:
        from alignedserve.launch.succession import RecordFile

        if not (num_ended := RecordFile(args.port).end_left()):
            raise
    print(f"ended {num_ended} processes that a launcher, which was killed, had left")
    return 0


def _scale(args: argparse.Namespace) -> int:
    from alignedserve.shell.control import ControlError

    if args.prefill is None and args.decode is None:
        raise ControlError("scale to how many? --prefill N, --decode N, or both")
    return _order(args.port, prefill=args.prefill, decode=args.decode)


def _restart(args: argparse.Namespace) -> int:
    from alignedserve.shell.control import RESTARTED

    return _order(args.port, RESTARTED, restart=True, in_place=args.in_place)


def _order(port: int, last: str = "", **asked: Any) -> int:
    """Order the launcher to do this, and print its answer; raise a ControlError where that is an error, or ends without
    this last line."""
    from alignedserve.shell.control import ControlError, LauncherOrder, ask

    line = ""
    for line in ask(port, LauncherOrder(**asked)):
        if line.startswith("error: "):
            raise ControlError(line.removeprefix("error: "))
        print(line, flush=True)
    if not line.startswith(last):
        raise ControlError("the launcher has ended meanwhile: not all is done")
    return 0


# --- batch


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Batch jobs on any server that has OpenAI's files and batches."""
    what = parser.add_subparsers(metavar="what", required=True)

    def add(name: str, about: str, act: Any) -> argparse.ArgumentParser:
        parser = what.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        add_flags(parser, BatchOptions)
        parser.set_defaults(run=_batch, act=act, parser=parser)
        return parser

    submit = add("submit", "upload a file of requests, and run it", _submit)
    add_flags(submit, BatchSubmission)
    status = add("status", "show the progress of a batch", lambda batch, server, args: batch.status(server, args.id))
    listed = add("list", "list the newest batches", lambda batch, server, args: batch.listed(server, args.limit))
    listed.add_argument("--limit", type=whole(1), default=20, metavar="N", help="how many (default: %(default)s)")
    about = "end a batch; finished lines are kept"
    cancel = add("cancel", about, lambda batch, server, args: batch.cancel(server, args.id))
    download = add("download", "download the results of a batch, and its errors beside them", _download)
    for command in (status, cancel, download):
        command.add_argument("id", metavar="ID")
    about = "where results go; errors go to FILE with .errors before its suffix"
    download.add_argument("--out", type=file, metavar="FILE", help=about)
    download.add_argument("file", type=file, nargs="?", metavar="FILE", help="the same as --out FILE")


def _batch(args: argparse.Namespace) -> int:
    from alignedserve.cli.remote import batch

    return int(args.act(batch, flags_of(args, BatchOptions), args))


def _submit(batch: Any, server: object, args: argparse.Namespace) -> int:
    check_goes_with(args, "--out", ("--wait",), given(args))
    if args.out is not None:
        check_writable(args.out)
    return int(batch.submit(server, flags_of(args, BatchSubmission)))


def _download(batch: Any, server: object, args: argparse.Namespace) -> int:
    if (args.out is None) == (args.file is None):
        raise ConfigError("name the file to write: --out FILE")
    check_writable(out := args.out or args.file)
    return int(batch.download(server, args.id, out))


# --- store


def add_store(parser: argparse.ArgumentParser) -> None:
    """Looks after the store of files and batch jobs, where `serve` with the same settings keeps it."""
    what = parser.add_subparsers(metavar="what", required=True)
    check = what.add_parser("check", help="show what the store guarantees and holds, and what is wrong with it")
    check.description = "Shows what the store guarantees and holds; exits with 1 where something is missing."
    check.set_defaults(run=_store_check)
    export = what.add_parser("export", help="write all records to a file")
    export.description = (
        "Writes all records to a file, each as a line of JSON; a backup needs the files' bytes besides."
    )
    export.add_argument("out", type=file, metavar="FILE")
    export.set_defaults(run=_store_export)
    for command in (check, export):
        command.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
        for path in ("jobs.store", "jobs.directory", "jobs.files"):
            add_setting(command, settings()[path])
        command.set_defaults(parser=command)


def _store_check(args: argparse.Namespace) -> int:
    from alignedserve.cli.store import check

    return check(config_of(args).jobs)


def _store_export(args: argparse.Namespace) -> int:
    check_writable(args.out)
    from alignedserve.cli.store import export

    return export(config_of(args).jobs, args.out)
