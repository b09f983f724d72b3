"""Batches, packing, losses and the optimizer step. Torch only: no asyncio, no store.

The service layer calls it with a batch and its settings, and gets weights and statistics. It must not use asyncio, the
queue or a service.
"""
