"""Asynchronous reinforcement-learning post-training of language models, as a mesh of services."""

__version__ = "0.1.0"
