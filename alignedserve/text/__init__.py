"""Convert between text and tokens: chat templates, tokenising, tool calls, reasoning, grammars and stop strings.

call_grammar.py   Writes grammars of tool calls in the format of a model.
chat_template.py  Turns chat messages into token ids in such a way that no message can write a special token.
decoding.py       Decodes an output's tokens to text while they arrive, and cuts it at its stop string.
encoding.py       Encodes a text to token ids, and tells before that it has far too many of them.
infill.py         Prompts that have a model fill in the middle of a text.
syntax.py         Grammars that an output's text must follow, over the tokens of a model.
syntax_trial.py   Tries a client's grammar in a process of its own, which may die of it.
text_model.py     Converts text to token ids and back with the tokenizer of a model folder.
token_sets.py     Packs a set of tokens into few bytes.
"""
