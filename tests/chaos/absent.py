"""What a machine lacks for a fault."""

from __future__ import annotations


class Absent(Exception):
    """Says why this machine cannot do a fault; the trial goes on without it, and the table says so."""
