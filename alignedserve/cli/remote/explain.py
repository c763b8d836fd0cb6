"""`alignedserve explain`: tells where a request waited, how long, and for which requests, as all parts remember."""

from __future__ import annotations

from urllib.parse import quote

from alignedserve.cli.remote.options import ExplainOptions
from alignedserve.cli.remote.status import DeploymentServer
from alignedserve.errors import AlignedServeError, file_errors


def run(options: ExplainOptions) -> int:
    path = f"/v1/requests/{quote(options.request, safe='')}/timeline"
    form = "perfetto" if options.perfetto else "json" if options.json else "text"
    with DeploymentServer(options) as server:
        told = server.whole("GET", path, params={"format": form}).text
    if options.perfetto is None:
        print(told.rstrip("\n"))
        return 0
    with file_errors(AlignedServeError, options.perfetto):
        options.perfetto.write_text(told, encoding="utf-8")
    print(f"{options.perfetto}: open it at https://ui.perfetto.dev")
    return 0
