"""The reward service: verifiers in worker processes that can be killed, typed outcomes, measured isolation."""
