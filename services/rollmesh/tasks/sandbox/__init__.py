"""Confinement of code and verifiers by the kernel: uids, resource limits, namespaces.

It stops accidents and casual cheating. It is not a security boundary; use containers or machines for that.
"""
