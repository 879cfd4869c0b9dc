"""Layer 1: the devices that engines are for, and what they are predicted to take."""
