"""Foundations of every service process: logs, metrics, health, gRPC, shutdown.

Every process uses it. It must not know trajectories, schedules or policies, and imports no package above it.
"""
