"""The ``rollmesh`` command; heavy packages are imported inside the commands that need them."""
