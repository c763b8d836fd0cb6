"""Figures of matplotlib, which is imported only when a plot is asked for.

`figure.savefig` chooses the canvas by the suffix of the file, so that no screen is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from alignedserve.cost.model import Kind
from alignedserve.errors import SimulateError, file_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND_COLOURS = {Kind.PREFILL: "#0b6e99", Kind.DECODE: "#c4541a", Kind.MIXED: "#5b8c2a"}


def new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SimulateError("plots need matplotlib: pip install 'alignedserve[lab]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    from matplotlib import rc_context

    same = {"svg.hashsalt": "alignedserve", "svg.fonttype": "none"}  # the same run gives the same file
    with file_errors(SimulateError, path), rc_context(same):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix.lower() == ".svg" else {})
