"""One module for each dashboard: ``NAME`` and ``build()``."""
