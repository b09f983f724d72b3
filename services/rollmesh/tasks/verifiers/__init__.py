"""What an answer is worth; ``registry.build_verifier`` makes the one that a run file names."""
