"""The trainer's service: the training loop, its session with the queue, publishing, rollback and the ranks."""
