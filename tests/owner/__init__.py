"""Owner."""
