"""Batch jobs: what they are, who runs their lines, and when."""
