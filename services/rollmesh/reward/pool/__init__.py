"""A pool of worker processes that run verifiers confined, and are killed when they take too long."""
