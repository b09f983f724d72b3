"""OpenAI-compatible API: chat and completions from the policy of a run, recorded as trajectories on request.

It runs a worker whose program waits for an outside agent, and turns the agent's calls into segments of the leased
trajectory. Clients of the API call it over HTTP. It must not score or train anything itself, and must not sample a
recorded call in another way than the run does.
"""
