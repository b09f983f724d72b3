"""Measurements of rollmesh: what its documents quote, and what a user runs on a machine of his own."""
