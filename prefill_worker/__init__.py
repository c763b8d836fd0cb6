"""Executes prompts, commits their KV to the pool."""
