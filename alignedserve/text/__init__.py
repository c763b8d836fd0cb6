"""Between text and tokens: templates, tokenising, tool calls, grammars and stop strings.

calls.py          Calls of tools in what a model writes, found as the text comes.
chat_template.py  Chat messages to token ids, such that no message can write a special token.
sketches.py       What the length predictor is to see of a prompt: made where the prompt became tokens, off
stopping.py       Where an output's text ends: at a stop string, however the text came in pieces.
syntax.py         Syntaxes: grammars of an output's text, over the tokens of a model.
text.py           Text to token ids and back, for one model folder.
token_bytes.py    What each token stands for by itself, in bytes: it may be part of a character only.
"""
