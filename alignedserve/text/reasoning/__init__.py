"""Reasoning before an answer: the markers of each family of models, and the parting of text at them.

families.py   The families of models that reason before they answer, by the names that vLLM has for their parsers.
harmony.py    Parts an output in the harmony form, which has messages in channels.
splitting.py  Parts an output's text into its reasoning and its answer while it arrives.
"""
