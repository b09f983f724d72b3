"""Shaping of rewards, of a single trajectory and of a group."""
