"""The gateway: web page, REST API and live events of a run, and the actions of its operator.

Browsers and scripts call it over HTTP. It reads the queue once a second for all clients, and writes
only operator actions. It must not hold state that the run needs: a restart of the gateway changes nothing.
"""
