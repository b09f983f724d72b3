"""rollmesh: asynchronous reinforcement-learning post-training of language models, as a mesh of services."""
