"""Policy losses per token, computed from log-probabilities, advantages and masks."""
