"""OpenAI's Responses API: responses, the events that tell of them, and where they are kept.

answer.py      Builds a response from the pieces of its answer, and the events of its stream.
background.py  Runs responses in the background, each as a batch job of one line.
chats.py       Turns a body into the chat that it asks for.
keeping.py     Keeps responses in the store of jobs, and finds conversations in it.
types.py       The body that creates a response, and the items of a conversation.
"""
