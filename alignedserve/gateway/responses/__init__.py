"""OpenAI's Responses API: responses, the events that tell of them, and where they are kept.

answer.py   Builds a response from the pieces of its answer, and the events of its stream.
keeping.py  Keeps responses in the store of jobs, finds conversations in it, and runs responses in the background.
types.py    The body that creates a response, the items of a conversation, and the chat that they become.
"""
