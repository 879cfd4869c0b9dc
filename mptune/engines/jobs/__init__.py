"""What runs in the worker."""
