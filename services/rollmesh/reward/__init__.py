"""The reward service: verifiers in processes that can be killed, typed outcomes, a measured level of isolation."""
