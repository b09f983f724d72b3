"""An SGLang server as the engine of a generator, over HTTP only: nothing of SGLang is imported here.

engine     asyncio face: implements ``generator.engines.protocol.Engine``
seats      which calls run, which wait, what they hold
slices     one request of a call and what comes back (pure)
reload     the order of steps that changes the weights under running requests (pure)
folders    what a policy folder holds, compared before the server is asked to load it
api        the server's HTTP endpoints
process    a server that this process starts, and keeper, which outlives both just long enough to end it
"""
