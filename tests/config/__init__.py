"""Tests of the configuration and of its reference page."""
