"""Runs prompts, emits the first tokens, and hands the KV on.

state.py      The prefill worker's core: the decode worker's, where nothing decodes.
actor.py      The worker's process.
"""
