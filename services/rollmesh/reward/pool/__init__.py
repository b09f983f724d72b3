"""The pool of confined worker processes that run verifiers; a worker that exceeds its time limit is killed."""
