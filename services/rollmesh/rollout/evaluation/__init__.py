"""Evaluation: fixed prompts, answered by one pinned policy version, scored, never trained on."""
