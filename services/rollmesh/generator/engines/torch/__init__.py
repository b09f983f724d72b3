"""The embedded engine: continuous batching of Hugging Face causal LMs on CPU or one GPU.

engine     asyncio face: implements ``generator.engines.protocol.Engine``
  worker   the model thread: commands, admission, one decode step after another
    batch      calls in slots: per-slot numbers, chunks, finishing
    cache      key-value cache in length tiers
    stepper    one decode step for the present rows: as they are, or padded to buckets of static shape
    graphs     CUDA only: capture and replay of a padded step
    plan       views of one step, rebuilt only when the rows change
    model      prefill, decode and scoring forward
    sampling   noise keyed by (seed, trajectory, position), inverse CDF
    admission  pure: which calls fit, how to batch their prefill
  weights, architecture, rope   from a Hugging Face folder to packed tensors
"""
