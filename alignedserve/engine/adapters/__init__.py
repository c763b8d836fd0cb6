"""Adapters (LoRA): their numbers are read into the layers' form, and kept for the steps that need them.

layers.py  The linear layers that adapters may change, those of the running step, and those that an engine keeps.
lora.py    Reads and checks an adapter in PEFT's format, without torch, since every part needs it.
"""
