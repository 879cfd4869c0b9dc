"""Which nodes share a precision."""
