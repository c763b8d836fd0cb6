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


def add_chat(parser: argparse.ArgumentParser) -> None:
    key = settings()["server.api_key"].variable
    parser.description = (
        "Chats with any server that has an OpenAI-compatible HTTP API; each line of piped input is a turn."
    )
    parser.add_argument("--url", default=f"{here()}/v1", help="the API's base (default: %(default)s)")
    parser.add_argument("--model", help="default: the first model that the server lists")
    parser.add_argument("--api-key", default=os.environ.get(key), help=f"default: {key}")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--max-tokens", type=whole(1), metavar="N", help="longest answer (default: the server's)")
    parser.add_argument("--temperature", type=zero_or_more, metavar="X", help="0 for greedy (default: the server's)")
    parser.set_defaults(run=_chat, parser=parser)


def _chat(args: argparse.Namespace) -> int:
    from alignedserve.cli.remote.chat import ChatOptions, run

    return run(
        ChatOptions(
            url=args.url,
            model=args.model,
            api_key=args.api_key,
            system=args.system,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
        )
    )


# --- status


def add_status(parser: argparse.ArgumentParser) -> None:
    key = settings()["server.api_key"].variable
    parser.description = (
        "Shows a deployment's parts, their nodes and the open requests; exits with 1 where it is not ready."
    )
    parser.add_argument("--url", default=here(), help="address of the deployment (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get(key), help=f"default: {key}")
    parser.add_argument(
        "--wait", type=zero_or_more, default=0.0, metavar="S", help="wait until it is ready, at most so many seconds"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.set_defaults(run=_status, parser=parser)


def _status(args: argparse.Namespace) -> int:
    from alignedserve.cli.remote.status import StatusOptions, run

    return run(StatusOptions(url=args.url, api_key=args.api_key, wait_s=args.wait, as_json=args.json))


# --- explain


def add_explain(parser: argparse.ArgumentParser) -> None:
    key = settings()["server.api_key"].variable
    parser.description = (
        "Tells where a request waited, for how long and for whom, what ran it, and why it was refused. Parts remember "
        "the last minutes, and tell only the key that sent the request."
    )
    named = "x-request-id or id of its answer; request_id of a batch line"
    parser.add_argument("request", metavar="REQUEST", help=named)
    parser.add_argument("--url", default=here(), help="address of the deployment (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get(key), help=f"default: {key}")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="as JSON, for programs")
    shape.add_argument("--perfetto", type=file, metavar="FILE", help="write a trace for ui.perfetto.dev")
    parser.set_defaults(run=_explain, parser=parser)


def _explain(args: argparse.Namespace) -> int:
    if args.perfetto is not None:
        check_writable(args.perfetto)
    from alignedserve.cli.remote.explain import ExplainOptions, run

    return run(ExplainOptions(args.request, args.url, args.api_key, args.json, args.perfetto))


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
    submit.set_defaults(run=_batch_submit)
    status = _add_batch_command(what, "status", "show the progress of a batch")
    status.add_argument("id", metavar="ID")
    status.set_defaults(run=_batch_status)
    listed = _add_batch_command(what, "list", "list the newest batches")
    listed.add_argument("--limit", type=whole(1), default=20, metavar="N", help="how many (default: %(default)s)")
    listed.set_defaults(run=_batch_list)
    cancel = _add_batch_command(what, "cancel", "end a batch; finished lines are kept")
    cancel.add_argument("id", metavar="ID")
    cancel.set_defaults(run=_batch_cancel)
    download = _add_batch_command(what, "download", "download the results of a batch, and its errors beside them")
    download.add_argument("id", metavar="ID")
    download.add_argument("out", type=file, metavar="FILE", help="errors go to FILE with .errors before its suffix")
    download.set_defaults(run=_batch_download)


def _add_batch_command(what: Any, name: str, about: str) -> argparse.ArgumentParser:
    key = settings()["server.api_key"].variable
    parser: argparse.ArgumentParser = what.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("--url", default=f"{here()}/v1", help="the API's base (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get(key), help=f"default: {key}")
    parser.set_defaults(parser=parser)
    return parser


def _batch_submit(args: argparse.Namespace) -> int:
    check_goes_with(args, "--out", ("--wait",), given(args))
    if args.out is not None:
        check_writable(args.out)
    from alignedserve.cli.remote.batch import BatchOptions, BatchSubmission, submit

    asked = BatchSubmission(args.file, args.window, args.endpoint, args.weight, args.wait, args.out)
    return submit(BatchOptions(args.url, args.api_key), asked)


def _batch_status(args: argparse.Namespace) -> int:
    from alignedserve.cli.remote.batch import BatchOptions, status

    return status(BatchOptions(args.url, args.api_key), args.id)


def _batch_list(args: argparse.Namespace) -> int:
    from alignedserve.cli.remote.batch import BatchOptions, listed

    return listed(BatchOptions(args.url, args.api_key), args.limit)


def _batch_cancel(args: argparse.Namespace) -> int:
    from alignedserve.cli.remote.batch import BatchOptions, cancel

    return cancel(BatchOptions(args.url, args.api_key), args.id)


def _batch_download(args: argparse.Namespace) -> int:
    check_writable(args.out)
    from alignedserve.cli.remote.batch import BatchOptions, download

    return download(BatchOptions(args.url, args.api_key), args.id, args.out)


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
    from alignedserve.cli.store import StoreOptions, check

    return check(StoreOptions(config_of(args).jobs))


def _store_export(args: argparse.Namespace) -> int:
    check_writable(args.out)
    from alignedserve.cli.store import StoreOptions, export

    return export(StoreOptions(config_of(args).jobs), args.out)
