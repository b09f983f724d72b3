"""Measured figures, each beside a named baseline in the same run; ``rollmesh bench NAME`` prints them."""
