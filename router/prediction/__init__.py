"""How long outputs will be.

length.py      What of the length predictor (ALISE §3.1) the router's core decides: whose length is asked for,
neighbours.py  Past prompts, how long their outputs were, and which of them are most like another prompt
network.py     A small network from a prompt's vector to the length of its output: for prompts that are like
predictor.py   How long outputs will be, by past ones: what the router's side process does, and the simulator
"""
