"""Simulator of a mesh on a virtual clock.

The scheduler's own code decides; engines, trainer, rewards, lengths and failures are models. All times are virtual
seconds, and equal seeds give equal results.
"""
