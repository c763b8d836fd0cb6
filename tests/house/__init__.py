"""Tests of the rules of this repository."""
