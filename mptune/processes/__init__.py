"""The worker process and its parent."""
