"""Checks of a run file before a folder is created or a process starts.

``rollmesh config validate``, ``rollmesh up`` and the start of a service call it. Rules that need no file and no machine
are raised where their values are resolved: in ``config.run``, and in ``scheduling.contradictions`` for a schedule. It
must not write, start a service, or change a queue.
"""
