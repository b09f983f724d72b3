"""Rollout service: workers run trajectories on generators, and one replica leads the mesh."""
