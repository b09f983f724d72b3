"""Records of a run that training leaves: metrics, the run log, trackers, and the shares that were trained on."""
