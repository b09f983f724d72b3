"""Supervised fine-tuning: rows, their batches, and training on the trainer's learner, without queue and services."""
