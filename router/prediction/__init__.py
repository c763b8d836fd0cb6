"""Predictions of how long outputs will be.

length.py      what the router's core asks of the predictor, and what it has it learn
neighbours.py  past prompts, and those most similar to another prompt
network.py     a small network, for prompts that no past prompt is like
predictor.py   the length predictor
"""
