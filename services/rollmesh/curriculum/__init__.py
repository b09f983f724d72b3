"""Curriculum: which prompt a group gets, how many rollouts it gets in which rounds, and what its answers are worth.

Samplers choose the row of a draw, planners the rounds of a group, group shapers the rewards of its members, and budgets
the length of a trajectory; ``replay`` draws groups of earlier batches. All are pure: they remember nothing beyond the
prompt history, the group's own record and the batch files, so that any leader or trainer at any moment decides the
same. The package knows neither torch nor the store. Source, options and deviation of a method are in its row:
``config/sampler_methods.py``, ``config/round_methods.py``.
"""
