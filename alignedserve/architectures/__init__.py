"""What a model folder says of the model: its shapes, its weights, and where the folder is.

config.py        What is asked of every model, whatever its family.
generic.py       What a config.json says of a model that transformers runs for us, by the names that its
given.py         What a config.json says, each key checked as it is read.
gpt_neox.py      GPT-NeoX (Pythia): a part of each head turns, attention and MLP run side by side or one after
llama.py         The Llama family: Llama 1 to 3 and Yi, Mistral, Qwen2, Qwen3; they differ in biases, norms of
model_config.py  Reads the configuration of a Hugging Face model folder; without torch, since every part needs
model_source.py  From what a user calls a model to the folder that holds it.
opt.py           OPT: learned positions, LayerNorm before each block, or after it as in the 350m.
rope.py          Rotary positions, as config.json describes them: the frequencies are computed in
weight_files.py  Which files of a model folder hold its weights, and how many numbers they hold; without torch.
"""
