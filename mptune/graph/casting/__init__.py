"""Which value has which type under a plan."""
