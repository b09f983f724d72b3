"""The trainer service, which claims batches, corrects for staleness, steps the optimizer and publishes policies."""
