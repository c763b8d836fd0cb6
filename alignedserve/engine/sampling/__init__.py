"""From logits to tokens: edits, grammars, draws and what a step returns.

edits.py        What changes logits before a token is chosen from them: limits, biases and penalties, for many
grammar.py      Grammars: which tokens may come next, asked before each token is sampled.
reading.py      A step that was begun, and its tokens on their way from the device.
sampling.py     From logits to tokens, for a whole batch at once, by a generator that has no state.
step_result.py  What a step brings: from its logits to tokens and log-probabilities.
"""
