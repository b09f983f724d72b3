"""Conversion between dataclasses and protobuf, and the gRPC clients of the mesh.

Services and clients of gRPC use it, and the store for payloads in Redis. It checks the shape of every message. It must
not contain rules of a service.
"""
