"""The trainer's service layer: training loop, session with the queue, publishing, rollback and ranks.

``trainer.main`` starts it on rank 0, which drives the other ranks. It must not contain formulas of the loss.
"""
