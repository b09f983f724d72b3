"""Advantages: one number per trajectory, computed from the rewards of its group or of its batch."""
