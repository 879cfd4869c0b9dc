"""What a difference looks like: another order, stale rows, the rounding of TF32 or FP16; NumPy only."""
