"""The page of a run that has ended: the gateway's page and read routes, answered from the run folder.

Nothing of it needs Redis or a service, and nothing acts on the run.
"""
