"""docs/schedules.md: one section per preset, with a picture of a small run on the queue model."""
