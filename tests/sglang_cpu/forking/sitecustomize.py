"""Lets the SGLang server fork its processes instead of spawning them; put on PYTHONPATH of the server.

A spawned process imports everything again: a server of three processes starts in 26 CPU seconds, a forking one in 11.
It starts them while it has a single thread, so that a fork is safe, and on a CPU there is no context of a GPU to lose.
"""

import multiprocessing

multiprocessing.set_start_method("fork")
multiprocessing.set_start_method = lambda method, force=False: None
