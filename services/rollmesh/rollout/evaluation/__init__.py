"""Evaluation: fixed prompts, answered by one pinned policy version, scored and never trained on."""
