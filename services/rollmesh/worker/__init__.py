"""Holding trajectories: the session with the queue, what is saved, and the generation calls that continue them.

Shared by every process that leases trajectories: the rollout workers and the gateway.
"""
