"""Rollout service: workers run trajectories on generators, and one replica leads the mesh.

It wires the worker, the leader and the evaluator of one replica; agents are evaluated by the agents service. The leader
applies the decisions of ``scheduling``; workers and generators follow the desired state. It must not decide anything
outside of ``scheduling``, and the leader calls no generator.
"""
