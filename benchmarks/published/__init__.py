"""Simulations behind docs/simulator-published.md (speed-ups) and docs/simulated-pools.md (pools and switches)."""
