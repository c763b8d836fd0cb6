"""Anthropic's Messages API: the bodies of requests, messages with the events that tell of them.

answer.py  Builds a message from the pieces of its answer, and the events of its stream.
types.py   The body that asks for a message, and the chat that it asks for.
"""
