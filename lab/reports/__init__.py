"""Figures, tables and plots of simulated runs.

comparison.py       Compares presets over the same arrivals: the mean and half the range over the seeds.
figure_rows.py      Lists the figures of the tables: order, name, unit, and which way is better.
figures.py          Builds all figures of a run as one tree.
paper_figures.py    Computes the figures of the papers, each as its paper defines it.
plots.py            Draws runs, comparisons and sweeps with matplotlib.
report.py           Writes runs as text, JSON and CSV.
step_figures.py     Computes the load of workers, the spread of prefixes and the errors of predictions.
sweep.py            Finds the highest arrival rate at which a preset still attains a mark.
timeline.py         Writes a run as a Chrome trace for Perfetto.
trial.py            Defines the input of a run and its result.
"""
