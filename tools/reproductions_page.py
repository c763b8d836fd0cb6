"""Write docs/reproductions.md and its pictures again from the numbers beside them, after a declaration has changed.

    python tools/reproductions_page.py

It runs nothing: `alignedserve reproduce --out docs` does, and writes all three.
"""

from __future__ import annotations

from pathlib import Path

from alignedserve.lab.cli.reproduce import runs_in, write
from alignedserve.lab.reproduce.papers import PAPERS

DOCS = Path(__file__).resolve().parents[1] / "docs"


def main() -> None:
    write(DOCS, list(PAPERS.values()), runs_in(DOCS))


if __name__ == "__main__":
    main()
