"""Adapters (LoRA) of a model, without torch: every part needs to know them.

lora.py  Reads and checks an adapter in PEFT's format.
"""
