"""Confinement of code and verifiers by the kernel's own means: uids, resource limits, namespaces.

It stops accidents and casual cheating. It is not a security boundary: that is what containers and machines are for.
"""
