"""Tests of shells and of links between them."""
