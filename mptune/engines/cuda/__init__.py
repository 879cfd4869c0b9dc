"""What mptune calls of the CUDA runtime."""
