"""Simulations behind docs/simulator.md (published speed-ups) and docs/simulated-pools.md (pools and switches)."""
