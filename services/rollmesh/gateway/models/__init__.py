"""Responses of the REST API. Times are Unix seconds, durations seconds, sizes bytes; null means unknown.

Identifiers and versions are those of the run: a policy version is an integer, a trajectory id is ``<group>.<member>``.
"""
