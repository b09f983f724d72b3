"""Worker of leased trajectories: queue session, saves, generation calls, rollout programs, scoring, evaluations.

Every process that leases trajectories uses it: the rollout workers and the agents service.

It must not decide which groups are admitted or cut, and must not append tokens to a trajectory whose lease it has lost.
"""
