"""Runs prompts, emits the first tokens, and hands the KV on.

running.py    The next step, also while one runs.
state.py      The prefill worker's core: the decode worker's, where nothing decodes.
actor.py      The worker's process.
"""
