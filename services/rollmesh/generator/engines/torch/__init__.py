"""The embedded engine: continuous batching of Hugging Face causal LMs on CPU or one GPU.

torch_declaration      entry of the engine registry
torch_engine           asyncio interface: implements ``generator.engines.engine_protocol.Engine``
torch_options          meaning of fields of the run file for this engine
  model_thread         the model thread: commands, admission, decode steps
    running_batch      calls in slots: prefill, chunks, end of calls
    running_call       one call
    slots              arrays of per-slot numbers
    sampled_tokens     token count and undelivered tokens of each slot
    kv_cache           key-value cache in length tiers
    stepper            one decode step for the current rows, exact or padded to buckets of static shape
    graphs             CUDA only: capture and replay of a padded step
    plan               views of one step, rebuilt only when the rows change
    decoder_model      forward pass for prefill, decode and scoring
    adapter_stack      factors of the loaded adapters, for rows of several versions
    multiply           matrix products by torch or numpy
    sampling           noise keyed by (seed, trajectory, position), inverse CDF
    prefill_admission  admission and prefill batches (pure)
  sequence_scores      log-probabilities of the canary and the audit
  staged_weights       weights of the next version, until the swap
  weights, adapter_weights, architecture, rope   packed tensors from a policy folder
"""
