"""OpenAI's interface: the bodies of requests and answers, their checks and errors.

admission.py       From what a client sent to Requests: prompts as tokens, limits, sampling. Nothing here
errors.py          Every error that a client can meet, in OpenAI's shape: over HTTP, or in the error file of a
formats.py         What a client may say of its answer's form: JSON, by a schema or not, a pattern, a grammar,
logprob_shapes.py  The JSON of log-probabilities: OpenAI's for chats, and its older one for completions.
parsing.py         From the bytes of a body to what a client asks for, checked.
promises.py        What a request is promised: its class and deadlines, from its body, its headers and its tier.
reading.py         From delivered tokens to pieces of an answer, for one request: nothing here waits, and
shapes.py          The JSON of an answer: chat or text completion, whole or in chunks.
strict.py          How bodies are read: nothing is converted, and what is not known, or not supported, is
tools.py           What a client may say of tools: which there are, and whether one is to be called.
types.py           What clients may send: OpenAI's fields, and vLLM's beside them.
"""
