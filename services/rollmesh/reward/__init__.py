"""The reward service: verifiers in worker processes that can be killed, typed outcomes, measured isolation.

Workers call it over gRPC with finished trajectories. It must not decode answers in its own process, reach Redis or
checkpoints, or turn a time-out into a silent 0.
"""
