"""A run on one machine: run folder, service processes, progress, and the path from start to report.

``rollmesh up`` and ``rollmesh demo`` call it; in a cluster the orchestrator takes its place. It starts, restarts and
stops processes. It must not do work of a service: a mesh without a launcher trains in the same way.
"""
