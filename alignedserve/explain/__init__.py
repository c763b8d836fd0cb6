"""Explain what happened to a request: cores note their decisions, and a story tells them.

decisions.py     The decisions that a core notes, and the ring that keeps the last of them.
sentences.py     Say decisions and stages of a story in plain sentences.
story.py         Merge what all parts noted of a request: stage after stage.
trace_file.py    Write a story as a trace for Perfetto.
"""
