"""The owner of requests keeps the only lasting copy of each open request.

accounts.py    What requests have used, also those that end early.
arrivals.py    Hand what arrives in the owner's thread to the coroutines that wait for it.
client.py      The interface of an owner, as the HTTP application and the job runner use it.
core.py        The owner's core: every token once and in order, a new attempt after a lost one.
explaining.py  Ask all parts what they decided about a request, and tell the story.
shell.py       The owner inside the gateway and the job runner: a thread beside their event loop.
siblings.py    Asks all owners of a deployment, whichever gateway is asked.
"""
