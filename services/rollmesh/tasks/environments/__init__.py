"""What a multi-turn rollout talks to; ``factory.environment_factory`` gives the one that a run file names."""
