"""Tests of the owner of requests."""
