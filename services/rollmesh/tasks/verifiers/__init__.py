"""Verifiers, which score answers; ``verifier_registry.build_verifier`` builds the one that a run file names."""
