"""Finds the cheapest deployment that keeps its promises, by a search over simulations.

demand.py       What a workload demands of workers, and the most that a device can do: hopeless sizes.
deployments.py  What may be deployed: devices with prices, and families of deployments that differ in size.
outcome.py      How far a simulated deployment kept its promises, and whether it is hopeless before it ends.
report.py       Writes the answer as text and as JSON, and draws attainment against size and load.
search.py       Decides which deployments to simulate next, and which is the answer.
"""
