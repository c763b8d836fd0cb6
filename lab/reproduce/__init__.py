"""The papers' figures, run again: what `alignedserve reproduce` runs and writes.

accelgen.py       AccelGen's figures.
aligned_serve.py  AlignedServe's figures.
alise.py          ALISE's figures.
apt_serve.py      Apt-Serve's figures.
bros.py           BROS' figures.
figure.py         What a figure is: its axes, systems, points and claims; and its numbers, which claims compute with.
files/            Devices and workloads that a figure needs and that have no name.
page.py           Writes the page and the JSON of all figures, and draws each in its paper's axes.
papers.py         Finds papers and figures by their names.
"""
