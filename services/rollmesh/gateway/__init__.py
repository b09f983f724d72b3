"""The gateway: what a person or an outside program sees of a run, over HTTP."""
