"""Example runs included in rollmesh: one folder each, with a run file, a model and the script that trains the model.

``rollmesh.config.recipes`` locates them.

``rollmesh demo`` and the tests start them. A recipe must not contain code that a run of a user would need.
"""
