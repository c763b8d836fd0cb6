"""Tests of what both kinds of workers share."""
