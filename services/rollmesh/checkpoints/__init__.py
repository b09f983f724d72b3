"""Persistent files of a run: published policies, batch files and trainer state, each valid only when complete.

The trainer writes them; generators, gateway, audit and launcher read them. Every file is verified before it is used: a
torn, damaged or foreign one is refused with the reason. It must not know the queue.
"""
