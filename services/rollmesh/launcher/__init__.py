"""One run on one machine: the run folder, the processes, their progress, and the run from start to report."""
