"""Predictions of how long outputs will be.

length.py      what the router's core asks of the predictor, and what it has it learn
neighbours.py  past prompts, and those most similar to another prompt
ridge.py       a regression, for prompts that no past prompt is like
calibration.py what recent outputs say about predictions: how sure they are, and whether they are used
predictor.py   the length predictor
"""
