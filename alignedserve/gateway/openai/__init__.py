"""OpenAI's interface: the bodies of requests and answers, their checks and errors.

errors.py          Errors in OpenAI's form: what they are made of, and those that several places raise.
formats.py         The forms that a client may demand of its answer: a JSON schema, a pattern, a grammar, ...
itemised.py        Answers that are told by items: what Responses and Messages have in common.
peers.py           The names that clients of other servers have for what a body says.
promises.py        Chooses a request's service class and deadlines.
reading.py         Turns the delivered tokens of a request into pieces of its answer.
requests.py        Makes Requests of a parsed body: prompts as tokens, limits, sampling. Answers /tokenize, /detokenize.
shapes.py          Makes the JSON of an answer: chat or text completion, whole or in chunks.
streaming.py       Sends answers to clients that may leave at any time.
strict.py          Parses bodies and validates them strictly: unknown fields are refused by name.
tools.py           The fields of a body about tools.
types.py           The bodies that clients may send: OpenAI's fields, and vLLM's too.
writing.py         Writes the JSON of answers in parts, so that none holds up those beside it.
"""
