"""The trainer service, which claims batches, corrects for staleness, steps the optimizer and publishes policies.

``learner`` computes a train step; ``service`` claims batches, writes states, metrics and logs, and publishes policies.
It must not train a batch before its file is on disk, or sample tokens.
"""
