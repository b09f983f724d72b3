"""Example runs included in rollmesh: one folder each, with a run file, a model and the script that trains the model.

``rollmesh.config.recipes`` locates them.
"""
