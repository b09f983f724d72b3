"""Records of a run: metrics, the run log, trackers, and the trained shares."""
