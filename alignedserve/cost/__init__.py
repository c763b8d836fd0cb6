"""How long a step takes: the cost model, how it is fitted, measured and stored.

fit.py      Finds the coefficients of the cost model: from a profile, and from then on from every step that ran.
model.py    What a step will take, predicted: plain arithmetic that every core can afford.
profile.py  A profile: steps of one model that were measured on one device, and the cost model that they give;
sums.py     `added(values)`: numbers, added one after the other.
trials.py   Which steps a profile measures: sizes that grow exponentially, then random ones.
"""
