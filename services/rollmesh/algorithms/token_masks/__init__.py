"""Token masks: the tokens that leave the numerator of the loss, decided once per train step before its first update."""
