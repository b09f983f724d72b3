"""The trainer's service layer: training loop, session with the queue, publishing, rollback and ranks."""
