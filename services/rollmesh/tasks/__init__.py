"""What a run trains on: prompt sources, verifiers and environments. No service state, no network but the judge."""
