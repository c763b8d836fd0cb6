"""The side process of the router, which learns and looks up predictions.

frames.py   What goes through the pipes of the router's side process: msgpack arrays, each after its length.
hands.py    The router's hands: what its core orders of the length predictor goes to the side process, and
minilm.py   Prompts by what they mean: a sentence encoder of 22 million weights, which the extra `predictor`
process.py  The router's side process: embeds prompts, searches past ones and trains, so that the router
"""
