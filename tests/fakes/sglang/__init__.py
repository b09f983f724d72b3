"""A fast stand-in for the SGLang server, found first on the path of ``python -m sglang.launch_server`` in unit tests.

It speaks the part of the HTTP API that rollmesh uses, over a real tiny Hugging Face model; the engine contract suite
holds it to the real server.
"""
