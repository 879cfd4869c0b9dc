"""One call of search or confirm, from start to end."""
