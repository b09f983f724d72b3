"""Planners: how many rollouts a group gets, in which rounds."""
