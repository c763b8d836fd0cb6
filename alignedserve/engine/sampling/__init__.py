"""Sampling: edits of logits, grammars, draws, and the result of a step.

edits.py        Edits logits before a token is chosen: limits, biases and penalties, for many requests at once.
grammar.py      Grammars of outputs: before each token is sampled, a grammar says which tokens may come next.
reading.py      Steps that were begun, and how the engine waits for their results.
reasoning.py    Reasoning before an answer: it ends with its budget, and a grammar holds for the answer alone.
sampling.py     Samples tokens from logits, for a whole batch at once, by a generator without state.
step_result.py  Makes the result of a step from its logits: tokens and log-probabilities.
turns.py        Does the work of several callers in one thread, each in its turn.
"""
