"""Figures, tables and plots of simulated runs.

comparison.py       Compares presets over the same arrivals, and finds the highest rate at which each attains a mark.
figure_rows.py      Lists the figures of the tables: order, name, unit, and which way is better.
figures.py          Builds all figures of a run as one tree.
plots.py            Draws runs, comparisons and sweeps with matplotlib.
report.py           Writes runs as text, JSON and CSV.
step_figures.py     Computes the load of workers, the spread of prefixes and the errors of predictions.
timeline.py         Writes a run as a Chrome trace for Perfetto.
trial.py            Defines the input of a run and its result.
"""
