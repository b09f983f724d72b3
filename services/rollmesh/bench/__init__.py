"""Benchmarks: each figure has a named baseline from the same run; ``rollmesh bench NAME`` prints them."""
