"""Batches, packing, losses and the optimizer step. Torch only: no asyncio, no store."""
