"""Findings about parts of a model that no plan changes."""
