"""The OpenAI-compatible API: chat and completions from the run's policy, recorded as trajectories when asked for."""
