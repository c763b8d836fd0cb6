"""Draw the tables of a request's life into docs/architecture.md, each between its two marks: the router's table
(router/lifecycle.py), and that of the workers (alignedserve/worker/step/states.py).

python tools/draw_lifecycle.py
"""

from __future__ import annotations

from pathlib import Path

from alignedserve.router import lifecycle
from alignedserve.worker.step import states

PAGE = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
DIAGRAMS = {"lifecycle": lifecycle.diagram, "worker-states": states.diagram}  # by the name of the marks


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def drawn(page: str) -> str:
    """Return the page with the diagrams of today's tables between their marks."""
    for name, diagram in DIAGRAMS.items():
        begin, end = marks(name)
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n```mermaid\n{diagram()}\n```\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
