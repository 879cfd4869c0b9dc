"""How latency is taken."""
