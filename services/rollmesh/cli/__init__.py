"""The ``rollmesh`` command; heavy packages are imported inside the commands that need them.

Users and containers call it. It parses options, prints results and maps errors to exit statuses. It must not contain
logic that a service or a test needs without a terminal.
"""
