"""Errors of outputs against the reference."""
