"""OpenAI's Responses API: responses, the events that tell of them, and where they are kept.

answer.py      Builds a response from the pieces of its answer, and the events of its stream.
background.py  Runs responses in the background, each as a batch job of one line.
keeping.py     Keeps responses in the store of jobs, and finds conversations in it.
types.py       The body that creates a response, the items of a conversation, and the chat that they become.
"""
