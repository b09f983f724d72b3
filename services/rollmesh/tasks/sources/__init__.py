"""Prompt sources; ``source_protocol.build_prompt_source`` builds the one that a run file names."""
