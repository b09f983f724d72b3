"""Built-in prompt samplers, one file each."""
