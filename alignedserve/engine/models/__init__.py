"""Models that the engine runs: our own modules, and every decoder of transformers.

activations.py          What an MLP without a gate computes of each number, in place where torch can.
attention.py            A step's attention: what is kept of its tokens, and what they attend to, request by
choice.py               Which module runs a model.
gpt_neox.py             GPT-NeoX (Pythia): a part of each head turns; attention and MLP run side by side, or
llama.py                The Llama family: one pass over the concatenated tokens of many requests.
loading.py              Makes a model's layers from a folder: what is fused is read part by part into its
model.py                What a model is to the engine, and the engine to a model.
opt.py                  OPT: positions are learned and added to the words; LayerNorm comes before each block,
rope.py                 Rotary positions: frequencies as transformers computes them, cosines and sines looked
runs.py                 One request's share of a step, and whether the engine can execute it.
tensors.py              Reads the tensors of a Hugging Face model folder, one after the other, each straight
transformers_checks.py  Whether our attention can stand in for that of a model of transformers: found out when
transformers_model.py   Runs a model of transformers that there is no module of our own for: its layers, our
"""
