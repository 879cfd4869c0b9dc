"""Metrics over a whole set of samples, with labels."""
