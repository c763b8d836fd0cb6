"""Take docs/dashboard-light.png and docs/dashboard-dark.png: the live page, as it shows a simulated run.

    python -m tests.dashboard_pictures

The run is the default schedule in the default topology, as on a GPU of AlignedServe's paper: chats beside documents.
Needs Chromium (`make chromium`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.trials.running import run_filmed
from tests.browser import chromium

DOCS = Path(__file__).resolve().parents[1] / "docs"
TRIAL = SimulationTrial("aligned", "coserve,chat.rate=6", "colocated", profile="a100-80-opt-13b-tp1")
WIDTH, HEIGHT, AT_S = 1240, 1262, 58.0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder, "profile")) as browser:
        page = Path(folder, "run.html")
        run_filmed(TRIAL, lambda _ended, _all: None, page)
        with browser.page(page.as_uri(), WIDTH, HEIGHT) as opened:
            opened.until("shown !== null")
            opened.send("Emulation.setScrollbarsHidden", hidden=True)
            opened.value("byId('range').value = '60'")
            opened.value(f"choose(pictures.findIndex(picture => picture.at >= {AT_S}))")
            for scheme in ("light", "dark"):
                opened.prefer(scheme)
                opened.until(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
                opened.value("show(shown)")
                (DOCS / f"dashboard-{scheme}.png").write_bytes(opened.picture())


if __name__ == "__main__":
    main()
