"""Tests of how a step is chosen."""
