"""Benchmarks: each figure has a named baseline from the same run; ``rollmesh bench NAME`` prints them.

``rollmesh bench`` calls it, on a machine without other work; tests call its parts. It must not be imported by a
service, and prints no figure without the baseline of the same run.
"""
