"""The embedded engine: continuous batching of Hugging Face causal LMs on CPU or one GPU.

A step: ``ModelThread._iterate`` starts waiting calls, ``RunningBatch.step`` schedules the rows, runs the model and
postprocesses the tokens. Its parts are ``decode_step``, ``decoder_model`` and ``sampling``.

torch_engine      asyncio interface: implements ``generator.engines.engine_protocol.Engine``
  model_thread    the model thread: commands, admission, decode steps, swaps
    running_batch calls in slots: decode steps, prefill, chunks, end of calls
    slots         one call, and arrays of per-slot numbers
    sampling      noise keyed by (seed, trajectory, position), inverse CDF
    decode_step   one decode step for the current rows, exact or padded to buckets of static shape (CUDA graphs)
    decode_plan   what a step reads and writes: one token of each row, or several of a draft (wide)
    speculation   which calls draft how many tokens, by what earlier drafts have cost and brought
    drafts        the newest responses to each prompt, and the one that continues as a call does
    decoder_model forward pass for prefill, decode and scoring
    kernels       matrix products by torch or numpy, norm, rotary embedding
    kv_cache      key-value cache in length tiers
    kept_prefixes tokens whose keys and values exist, for calls that begin with them
    adapters      adapters of a folder, and those loaded, for rows of several versions
weights, architecture   packed tensors from a policy folder
"""
