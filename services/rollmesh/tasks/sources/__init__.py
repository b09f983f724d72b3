"""Prompt sources; ``source_registry.build_prompt_source`` builds the one that a run file names."""
