"""Read the configuration of a model of each family.

deepseek.py      DeepSeek V2 and V3 and their kin, which keep one compressed vector of each token
encoders.py      BERT, RoBERTa, XLM-R, CamemBERT, ELECTRA and ModernBERT: encoders
gemma.py         Gemma 1 to 3, of files with images the text part
generic.py       the configuration of a model that transformers runs
llama.py         the Llama family: Llama, Yi, Mistral, Qwen2, Qwen3; and GLM-4 of one MLP
lora.py          adapters (LoRA) in PEFT's format
mixtures.py      mixtures of experts whose attention is Llama's
model_config.py  reads the configuration of a model folder
opt.py           OPT: an MLP without a gate
"""
