"""Where prompts come from; ``factory.build_prompt_source`` makes the one that a run file names."""
