"""Layer 1: calibration samples, and how far outputs lie from the reference."""
