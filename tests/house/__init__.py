"""Tests of the rules of this repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("alignedserve", "router", "prefill_worker", "decode_worker", "kvpool", "kernels", "papers", "lab")
