"""Executes one step plan after the other on a device; it decides nothing."""
