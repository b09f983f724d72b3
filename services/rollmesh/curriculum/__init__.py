"""Curriculum: which prompt a group gets, how many rollouts it gets in which rounds, and what its answers are worth.

Samplers choose the row of a draw, planners the rounds of a group, group shapers the rewards of its members, and budgets
the length of a trajectory. All are pure: they remember nothing beyond the prompt history and the group's own record, so
that any leader at any moment decides the same. The package knows neither torch nor the store.
"""
