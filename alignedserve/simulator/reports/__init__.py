"""Figures, tables and plots of simulated runs.

comparison.py       Several presets over the same arrivals: each figure as its mean over the seeds and half
figure_rows.py      What tables show of the figures: in which order, under which name, in which unit, and
figures.py          All figures of a run, as one tree: what tables, files and comparisons show
paper_figures.py    The figures of the papers, each as its paper defines it, so that their tables can be
plots.py            Pictures of runs, drawn by matplotlib, which is imported when one is asked for: nothing
report.py           What a run says, as text for people, as JSON for programs, and as CSV of requests, steps
request_figures.py  What clients got: of each request whether its promises were kept, and of all of one class
step_figures.py     What workers did: how busy they were, how unequal their batches, how well the cost model
sweep.py            The same preset at several rates: how much it can take. Its effective throughput is the
timeline.py         A run as a Chrome trace, to look at in Perfetto (ui.perfetto.dev): who did what, when.
trial.py            One run of a comparison: what is asked for, who does it, and what came of it.
"""
