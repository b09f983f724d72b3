"""Environments of multi-turn rollouts; ``environment_protocol.environment_factory`` builds the one of a run file."""
