"""OpenAI's interface: the bodies of requests and answers, their checks and errors.

adapting.py        Loads and unloads adapters (LoRA), in the words of vLLM.
calling.py         The format and the grammar of the calls in an answer.
errors.py          Every error that a client can get, in OpenAI's form.
formats.py         The forms that a client may demand of its answer: a JSON schema, a pattern, a grammar, ...
parsing.py         Parses and checks the bytes of a body.
promises.py        Chooses a request's service class and deadlines.
reading.py         Turns the delivered tokens of a request into pieces of its answer.
reasoning.py       The reasoning before the answer to a chat: where it begins, and what limits it.
requests.py        Makes Requests of a parsed body: prompts as tokens, limits, sampling.
shapes.py          Makes the JSON of an answer: chat or text completion, whole or in chunks.
strict.py          Validates bodies strictly: nothing is converted, unknown fields are refused by name.
tokenising.py      Converts prompts to tokens and back: /tokenize and /detokenize.
tools.py           The fields of a body about tools.
types.py           The bodies that clients may send: OpenAI's fields, and vLLM's too.
writing.py         Writes the JSON of answers in parts, so that none holds up those beside it.
"""
