"""Find the tool calls in a model's output, in the format of each family of models.

formats.py  The formats in which models call tools: how each is recognised, and how it is read.
parts.py    The parts of an output that has tool calls in it.
reading.py  Finds the tool calls in a model's output while its text arrives.
"""
