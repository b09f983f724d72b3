"""Prompt sources, verifiers and environments of a run: no service state; only the HTTP judge uses the network."""
