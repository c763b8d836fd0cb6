"""Draw the table of a request's life (router/lifecycle.py) into docs/architecture.md, between its two marks.

python tools/draw_lifecycle.py
"""

from __future__ import annotations

from pathlib import Path

from alignedserve.router.lifecycle import diagram

PAGE = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- lifecycle:begin -->", "<!-- lifecycle:end -->"


def drawn(page: str) -> str:
    """Return the page with the diagram of today's table between the marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n```mermaid\n{diagram()}\n```\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
