"""Anthropic's Messages API: the bodies of requests, messages with the events that tell of them, errors.

answer.py  Builds a message from the pieces of its answer, and the events of its stream.
chats.py   Turns a body into the chat that it asks for.
errors.py  Every error that a client can get, in Anthropic's form.
types.py   The body that asks for a message.
"""
