"""Group-relative advantages: one number per trajectory, computed from the rewards of its group."""
