"""Verifiers, which score answers; ``verifier_protocol.build_verifier`` builds the one that a run file names."""
