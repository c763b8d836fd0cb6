"""The cost model, which predicts how long a step takes; how it is fitted, measured and stored.

fit.py      finds the coefficients of the cost model, from a profile and from every step that runs
model.py    the cost model: how long a step or a copy will take
profile.py  measured steps of one model on one device, and their file
promising.py  what a worker can promise chats that ask for nothing, by its cost model
sums.py     `added(values)` adds numbers one after the other
trials.py   the steps that a profile measures
"""
