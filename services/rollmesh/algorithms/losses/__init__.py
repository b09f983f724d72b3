"""Policy losses: per-token losses from log-probabilities, advantages and masks."""
