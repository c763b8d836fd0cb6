"""Runs prompts, emits their first tokens, and hands their KV on.

state.py      The prefill worker's core: the decode worker's, where nothing decodes.
actor.py      The worker's process.
"""
