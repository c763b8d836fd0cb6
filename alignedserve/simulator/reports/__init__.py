"""Figures, tables and plots of simulated runs.

comparison.py       Compares presets over the same arrivals: means over the seeds, and half the range.
figure_rows.py      Lists the figures of the tables: order, name, unit, and which way is better.
figures.py          Builds all figures of a run as one tree.
paper_figures.py    Computes the figures of the papers, each as its paper defines it.
plots.py            Draws runs, comparisons and sweeps with matplotlib.
report.py           Writes runs as text, JSON and CSV.
request_figures.py  Computes what clients got: promises kept, and figures by class.
step_figures.py     Computes what workers did: load, spread of prefixes, errors of predictions.
sweep.py            Finds the highest rate at which a preset attains enough.
timeline.py         Writes a run as a Chrome trace for Perfetto.
trial.py            Defines a run to make, and a run that was made.
"""
