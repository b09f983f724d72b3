"""Teacher service: log-probabilities of given tokens under frozen weights.

It computes with the trainer's learner, or by an SGLang server.
"""
