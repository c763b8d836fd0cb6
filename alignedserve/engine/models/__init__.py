"""What models are made of, and every decoder that transformers runs.

activations.py          Activation functions: of an MLP without a gate, and of layers that make vectors.
experts.py              The MLP of a layer: gated, dense or a mixture of experts.
encoder.py              What encoders share: all texts of a step run at once, and nothing is padded.
folding.py              Attention over KV that is partly folded, and the copy that folds blocks behind the windows.
loading.py              Builds a model's layers from a folder; fused layers are read part by part.
model.py                The interface between the engine and a model.
rope.py                 Rotary positions: frequencies, and tables of cosines and sines.
runs.py                 A request's share of a step, and the check that the engine can execute it.
transformers_checks.py  Checks at load time that our attention can replace that of a transformers model.
transformers_layers.py  Gives a transformers model linear layers of ours, whose weights are quantised.
transformers_model.py   Runs a transformers model that has no module of our own: its layers, our attention.
"""
