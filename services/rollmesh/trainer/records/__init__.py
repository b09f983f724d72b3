"""Records of a run: metrics, the run log, trackers, and the trained shares.

The training loop calls it after each step. It must not influence a step: a failed tracker or a full disk delays it at
most.
"""
