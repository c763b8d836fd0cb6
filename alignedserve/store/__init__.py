"""Where files, jobs and the results of their lines are kept: written before they are acknowledged."""
