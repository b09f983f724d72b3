"""Countdown search: the demo run (``demo.yaml``), its warm start (``model/``) and the training of the warm start."""
