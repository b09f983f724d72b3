"""Prompt sources, verifiers and environments of a run: no service state; only the HTTP judge uses the network.

The leader opens prompts, rollout programs create environments, and processes of the reward service run verifiers. Users
extend it by ``module:function`` in the run file. It must not know the queue or the services.
"""
