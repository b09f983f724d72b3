"""Worker of leased trajectories: session with the queue, saves, generation calls, rollout programs and scoring.

Every process that leases trajectories uses it: the rollout workers and the agents service.

It must not decide which groups are admitted or cut, and must not append tokens to a trajectory whose lease it has lost.
"""
