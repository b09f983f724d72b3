"""Reports of a run: its page, audit, explanation of one batch, comparison of runs.

The modules read a run folder written by the services; ``trajectory_status`` reads the queue too. A running mesh does
not need them. Reports state only facts of the run, and name missing data as missing.

The command line calls it, and the launcher at the end of a run. It must not write to the queue or to checkpoints.
"""
