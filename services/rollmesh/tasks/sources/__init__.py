"""Prompt sources; ``source_factory.build_prompt_source`` builds the one that a run file names."""
