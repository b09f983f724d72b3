"""The rollout service: workers run trajectories on generators, one replica leads the mesh."""
