"""The trainer service: claims batches, corrects for staleness, steps the optimizer, publishes policies."""
