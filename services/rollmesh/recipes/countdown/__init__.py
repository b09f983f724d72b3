"""Countdown search: the demo run (``demo.yaml``), its warm start (``model/``) and how that was trained."""
