"""Environments of multi-turn rollouts; ``environment_factory.environment_factory`` builds the one of a run file."""
