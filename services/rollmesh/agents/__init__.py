"""OpenAI-compatible API: chat and completions from the policy of a run, recorded as trajectories on request."""
