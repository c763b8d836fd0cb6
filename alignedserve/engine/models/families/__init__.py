"""Models that the engine runs by modules of our own, and the choice of a model's module.

bert.py         BERT, RoBERTa, XLM-R, CamemBERT and ELECTRA: encoders of one architecture.
choice.py       Chooses the module that runs a model.
deepseek.py     DeepSeek and its kin, which attend to one compressed vector of each token.
llama.py        The Llama family, Gemma, GLM, Phi-3 and Llama 4's text part.
modern_bert.py  ModernBERT: an encoder with rotary positions, and layers that read near tokens alone.
opt.py          OPT.
"""
