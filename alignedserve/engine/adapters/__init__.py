"""Adapters (LoRA): their numbers are read into the layers' form, and kept for the steps that need them.

kept.py    The adapters whose numbers an engine keeps, the least recently used forgotten first.
layers.py  The linear layers of a model that adapters may change, and the adapters of the running step.
"""
