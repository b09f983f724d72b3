"""An SGLang server as the engine of a generator, over HTTP only: nothing of SGLang is imported here.

engine     asyncio face: implements ``generator.engines.protocol.Engine``
state      what the parts share
calls      a call's way: its turn, its slices, its end
seats      which calls run, which wait, what they hold
slices     one request of a call and what comes back (pure)
reload     the order of steps that changes the weights under running requests (pure)
folders    what a policy folder holds, compared before the server is asked to load it
server     the server behind it all: started or found, watched, paused, loaded
settings   whether its settings let it serve the run (pure)
clock      stands still while it is paused
api        its HTTP endpoints
process    one that this process starts, and keeper, which outlives both just long enough to end it
"""
