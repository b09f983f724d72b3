"""Group-relative advantages: one number per trajectory, from the rewards of its group."""
