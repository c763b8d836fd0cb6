"""Read a model folder, which gives the shapes and weights of a model, and find the folder.

config.py        what the engine needs to know of every model
given.py         a config.json, each key checked when it is read
kv_dtype.py      how K and V are kept on the device
model_source.py  finds the folder of a model from the name that a user gives
named_models.py  models by name that package indexes carry, such as smollm2
quantization.py  how the weights of linear layers are kept
rope.py          rotary positions
routing.py       how tokens choose among the experts of a layer
stored_form.py   how a folder's linear layers are quantised already
template_file.py the chat template of a folder, which a base model lacks
vectors.py       models that make vectors: encoders, and how a folder makes one of a text
weight_files.py  the weight files of a model folder
"""
