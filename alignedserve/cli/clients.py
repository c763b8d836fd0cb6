"""The flags of the commands that talk to a server or look after its store: chat, status, explain, stop, scale, batch,
store."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignedserve.cli.serving import add_setting, config_of
from alignedserve.cli.terminal.arguments import (
    Once,
    above_zero,
    check_goes_with,
    check_writable,
    file,
    given,
    options_of,
    whole,
    zero_or_more,
)
from alignedserve.config.config import settings

# --- chat

if TYPE_CHECKING:
    from alignedserve.shell.control import LauncherOrder


def here() -> str:
    """Return where a deployment with the default address serves."""
    return f"http://{settings()['server.host'].default}:{settings()['server.port'].default}"


def _add_server(parser: argparse.ArgumentParser, url: str, about: str) -> None:
    key = settings()["server.api_key"].variable
    parser.add_argument("--url", default=url, help=f"{about} (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get(key), help=f"default: {key}")


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Chats with any server that has an OpenAI-compatible HTTP API; each line of piped input is a turn."
    )
    _add_server(parser, f"{here()}/v1", "the API's base")
    parser.add_argument("--model", help="default: the first model that the server lists")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--max-tokens", type=whole(1), metavar="N", help="longest answer (default: the server's)")
    parser.add_argument("--temperature", type=zero_or_more, metavar="X", help="0 for greedy (default: the server's)")
    parser.set_defaults(run=_chat, parser=parser)


def _chat(args: argparse.Namespace) -> int:
    from alignedserve.cli.remote.chat import ChatOptions, run

    return run(options_of(ChatOptions, args))


# --- status


def add_status(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows a deployment's parts, their nodes and the open requests; exits with 1 where it is not ready."
    )
    _add_server(parser, here(), "address of the deployment")
    parser.add_argument(
        "--wait",
        dest="wait_s",
        type=zero_or_more,
        default=0.0,
        metavar="S",
        help="wait until it is ready, at most so many seconds",
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="as JSON, for programs")
    parser.set_defaults(run=_status, parser=parser)


def _status(args: argparse.Namespace) -> int:
    from alignedserve.cli.remote.status import StatusOptions, run

    return run(options_of(StatusOptions, args))


# --- explain


def add_explain(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tells where a request waited, for how long and for whom, what ran it, and why it was refused. Parts remember "
        "the last minutes, and tell only the key that sent the request."
    )
    named = "x-request-id or id of its answer; request_id of a batch line"
    parser.add_argument("request", metavar="REQUEST", help=named)
    _add_server(parser, here(), "address of the deployment")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", dest="as_json", action="store_true", help="as JSON, for programs")
    shape.add_argument("--perfetto", type=file, metavar="FILE", help="write a trace for ui.perfetto.dev")
    parser.set_defaults(run=_explain, parser=parser)


def _explain(args: argparse.Namespace) -> int:
    if args.perfetto is not None:
        check_writable(args.perfetto)
    from alignedserve.cli.remote.explain import ExplainOptions, run

    return run(options_of(ExplainOptions, args))


# --- stop, scale


def add_stop(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Stops the deployment that you serve on this machine, as Ctrl-C would: open requests go on for server.drain_s. "
        "On a cluster run it on the head."
    )
    _add_port(parser)
    parser.set_defaults(run=_stop, parser=parser)


def add_scale(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Changes how many workers a deployment has, while it serves. New workers are used once they are ready; workers "
        "that leave take nothing new and end when they have no request, or after server.drain_s: open requests then go "
        "on elsewhere. Run it where `alignedserve serve` runs, as the same user."
    )
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill workers (default: as many as there are)")
    parser.add_argument("--decode", type=int, metavar="N", help="decode workers (default: as many as there are)")
    _add_port(parser)
    parser.set_defaults(run=_scale, parser=parser)


def _add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port",
        type=int,
        default=settings()["server.port"].default,
        help="port that it serves on (default: %(default)s)",
    )


def _stop(args: argparse.Namespace) -> int:
    from alignedserve.shell.control import LauncherOrder

    return _say_all(args.port, LauncherOrder(stop=True))


def _scale(args: argparse.Namespace) -> int:
    from alignedserve.shell.control import ControlError, LauncherOrder

    if args.prefill is None and args.decode is None:
        raise ControlError("scale to how many? --prefill N, --decode N, or both")
    return _say_all(args.port, LauncherOrder(prefill=args.prefill, decode=args.decode))


def _say_all(port: int, order: LauncherOrder) -> int:
    from alignedserve.shell.control import ControlError, ask

    for line in ask(port, order):
        if line.startswith("error: "):
            raise ControlError(line.removeprefix("error: "))
        print(line, flush=True)
    return 0


# --- batch


def add_batch(parser: argparse.ArgumentParser) -> None:
    parser.description = "Batch jobs on any server that has OpenAI's files and batches."
    what = parser.add_subparsers(metavar="what", required=True)
    submit = _add_batch_command(what, "submit", "upload a file of requests, and run it")
    submit.add_argument("file", type=file, metavar="FILE", help="a request in each line, in OpenAI's format")
    submit.add_argument(
        "--window", default="24h", metavar="W", help="completion window, 10m to 7d (default: %(default)s)"
    )
    submit.add_argument("--endpoint", metavar="PATH", help="default: the url of the first line")
    submit.add_argument(
        "--weight", type=above_zero, metavar="X", help="its share beside other batches; only AlignedServe has it"
    )
    submit.add_argument("--wait", action=Once, nargs=0, const=True, default=False, help="wait until it has ended")
    submit.add_argument("--out", action=Once, type=file, metavar="FILE", help="with --wait: file for the results")
    submit.set_defaults(act=_submit)
    status = _add_batch_command(what, "status", "show the progress of a batch")
    status.add_argument("id", metavar="ID")
    status.set_defaults(act=lambda batch, server, args: batch.status(server, args.id))
    listed = _add_batch_command(what, "list", "list the newest batches")
    listed.add_argument("--limit", type=whole(1), default=20, metavar="N", help="how many (default: %(default)s)")
    listed.set_defaults(act=lambda batch, server, args: batch.listed(server, args.limit))
    cancel = _add_batch_command(what, "cancel", "end a batch; finished lines are kept")
    cancel.add_argument("id", metavar="ID")
    cancel.set_defaults(act=lambda batch, server, args: batch.cancel(server, args.id))
    download = _add_batch_command(what, "download", "download the results of a batch, and its errors beside them")
    download.add_argument("id", metavar="ID")
    download.add_argument("out", type=file, metavar="FILE", help="errors go to FILE with .errors before its suffix")
    download.set_defaults(act=_download)


def _add_batch_command(what: Any, name: str, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = what.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    _add_server(parser, f"{here()}/v1", "the API's base")
    parser.set_defaults(run=_batch, parser=parser)
    return parser


def _batch(args: argparse.Namespace) -> int:
    from alignedserve.cli.remote import batch

    return int(args.act(batch, options_of(batch.BatchOptions, args), args))


def _submit(batch: Any, server: object, args: argparse.Namespace) -> int:
    check_goes_with(args, "--out", ("--wait",), given(args))
    if args.out is not None:
        check_writable(args.out)
    return int(batch.submit(server, options_of(batch.BatchSubmission, args)))


def _download(batch: Any, server: object, args: argparse.Namespace) -> int:
    check_writable(args.out)
    return int(batch.download(server, args.id, args.out))


# --- store


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.description = "Looks after the store of files and batch jobs, where `serve` with the same settings keeps it."
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
