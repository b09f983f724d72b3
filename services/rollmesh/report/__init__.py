"""Reports of a run: plots, HTML report, audit, explanation of one batch, comparison of runs.

All modules read a run folder written by the services; a running mesh does not need them. Reports state only facts of
the folder, and name missing data as missing.

The command line calls it, and the launcher at the end of a run. It must not write to the queue or to checkpoints.
"""
