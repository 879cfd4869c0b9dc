"""Boundaries between groups, what a plan crosses of them, and the plans that minimise a sum of such terms."""
