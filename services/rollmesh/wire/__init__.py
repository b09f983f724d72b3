"""Conversion between dataclasses and protobuf, and the gRPC clients of the mesh."""
