"""Runs that ship with rollmesh: a folder each, with a run file, a model and the script that made the model.

``rollmesh.config.recipes`` finds them.
"""
