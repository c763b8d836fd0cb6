"""Decodes batches from the pool; colocated, it runs the prompts too."""
