"""The generator service: serves the newest policy version; of a run with an adapter, several versions at once.

Workers call it over gRPC. It registers itself, finds new policies in the registry, verifies and loads them, and scores
the canary before it serves them. It must not write to the queue of trajectories, and must not deliver a token of a
version that it has not verified.
"""
