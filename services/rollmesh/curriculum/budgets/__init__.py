"""Budgets: tokens or turns of a trajectory by the train step under whose policy it is born."""
