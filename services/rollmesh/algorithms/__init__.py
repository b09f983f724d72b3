"""Pure functions of reinforcement learning: advantages, losses, corrections, masks. No I/O, no service imports.

Importing this package loads nothing; the submodules load torch, except ``shaping``, which rollout workers use.

The trainer's learner calls them with arrays of one batch. They must not read the run file or any other file.
"""
