"""What the commands take that talk to a server, or look after what it keeps."""

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


def add_chat(parser: argparse.ArgumentParser) -> None:
    key = settings()["server.api_key"].variable
    parser.description = (
        "Chats with any server that has an OpenAI-compatible HTTP API; piped input is one turn per line."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the API's base (default: %(default)s)")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", default=os.environ.get(key), help=f"default: {key}")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the chat")
    parser.add_argument("--max-tokens", type=whole(1), metavar="N", help="longest answer (default: the server's)")
    parser.add_argument("--temperature", type=zero_or_more, metavar="X", help="0 for greedy (default: the server's)")
    parser.set_defaults(run=_chat, parser=parser)


def _chat(args: argparse.Namespace) -> int:
    from alignedserve.cli.chat import ChatOptions, run

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
    from alignedserve.cli.status import StatusOptions, run

    return run(StatusOptions(url=args.url, api_key=args.api_key, wait_s=args.wait, as_json=args.json))


# --- stop, scale


def add_stop(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Stops what you serve on this machine as Ctrl-C would: open requests are finished, for server.drain_s; "
        "on a cluster, on the head."
    )
    _add_port(parser)
    parser.set_defaults(run=_stop, parser=parser)


def add_scale(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Changes how many workers a deployment has, while it serves. New ones are used once they are there; others get "
        "nothing new and end when nothing is left there, or after server.drain_s: what is open then goes on elsewhere. "
        "To be asked where `alignedserve serve` runs, by the same user."
    )
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill workers (default: as many as there are)")
    parser.add_argument("--decode", type=int, metavar="N", help="decode workers (default: as many as there are)")
    _add_port(parser)
    parser.set_defaults(run=_scale, parser=parser)


def _add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8000, help="which it serves on (default: %(default)s)")


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
    from alignedserve.cli.batch import BatchOptions, BatchSubmission, submit

    asked = BatchSubmission(args.file, args.window, args.endpoint, args.weight, args.wait, args.out)
    return submit(BatchOptions(args.url, args.api_key), asked)


def _batch_status(args: argparse.Namespace) -> int:
    from alignedserve.cli.batch import BatchOptions, status

    return status(BatchOptions(args.url, args.api_key), args.id)


def _batch_list(args: argparse.Namespace) -> int:
    from alignedserve.cli.batch import BatchOptions, listed

    return listed(BatchOptions(args.url, args.api_key), args.limit)


def _batch_cancel(args: argparse.Namespace) -> int:
    from alignedserve.cli.batch import BatchOptions, cancel

    return cancel(BatchOptions(args.url, args.api_key), args.id)


def _batch_download(args: argparse.Namespace) -> int:
    check_writable(args.out)
    from alignedserve.cli.batch import BatchOptions, download

    return download(BatchOptions(args.url, args.api_key), args.id, args.out)


# --- store


def add_store(parser: argparse.ArgumentParser) -> None:
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
        for path in ("jobs.store", "jobs.directory", "jobs.files"):
            add_setting(one, settings()[path])
        one.set_defaults(parser=one)


def _store_check(args: argparse.Namespace) -> int:
    from alignedserve.cli.store import StoreOptions, check

    return check(StoreOptions(config_of(args).jobs))


def _store_export(args: argparse.Namespace) -> int:
    check_writable(args.out)
    from alignedserve.cli.store import StoreOptions, export

    return export(StoreOptions(config_of(args).jobs), args.out)
