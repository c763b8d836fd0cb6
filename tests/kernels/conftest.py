"""Fixtures of the tests of kernels."""

from __future__ import annotations

from tests.kernels.interpreter import patched_once as patched_once
