"""Tests of load tests: their core, the answers that they read, their figures, and the command."""
