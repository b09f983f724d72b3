"""Persistent files of a run: published policies, batch files and trainer state, each valid only when complete."""
