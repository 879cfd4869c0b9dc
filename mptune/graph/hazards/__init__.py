"""Where FP16 cannot hold a value."""
