"""Commands that talk to a server over HTTP.

batch.py      `alignedserve batch`: batch jobs on any server that has OpenAI's files and batches
chat.py       `alignedserve chat`: a chat in the terminal with any OpenAI-compatible server
explain.py    `alignedserve explain`: where a request waited, how long, and for which requests
options.py    the flags of these commands, each declared once
status.py     `alignedserve status`: a deployment's parts, their nodes, and the open requests
"""
