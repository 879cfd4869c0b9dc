"""Layer 2: all that touches a device. Everything here that can crash runs in a worker process."""
