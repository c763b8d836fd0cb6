"""The model families that the engine runs."""
