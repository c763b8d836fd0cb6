"""Tests of what the machine has, and of what fits into its memory."""
