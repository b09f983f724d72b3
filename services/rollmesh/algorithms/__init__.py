"""Functions of reinforcement learning on arrays of one batch: advantages, losses, token masks, corrections. No I/O.

Name, source, options and deviation of a method are in its row: ``config/advantage_methods.py``, ``loss_methods.py``,
``old_logprob_methods.py``.
"""
