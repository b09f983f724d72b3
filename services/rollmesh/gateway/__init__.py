"""The gateway: web page, REST API and live events of a run, and the actions of its operator."""
