"""A run on one machine: run folder, service processes, progress, and the path from start to report."""
