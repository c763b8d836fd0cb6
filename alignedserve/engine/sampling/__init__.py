"""Sampling: edits of logits, grammars, draws, and the result of a step.

edits.py        Edits logits before a token is chosen: limits, biases and penalties, for many requests at once.
grammar.py      Grammars of outputs say which tokens may come next; reasoning before an answer ends with its budget.
reading.py      Steps that were begun, and their results: tokens and log-probabilities.
sampling.py     Samples tokens from logits, for a whole batch at once, by a generator without state.
"""
