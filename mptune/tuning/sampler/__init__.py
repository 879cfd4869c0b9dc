"""Which plan to evaluate next: the mathematics."""
