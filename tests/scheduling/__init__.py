"""Tests of promises, orders, levels and predictions."""
