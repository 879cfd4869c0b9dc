"""Findings about parts of a model that no plan changes."""

OUT_OF_REACH = "operators-out-of-reach"
"""The code of the finding that operators keep their precision whatever a plan says."""

NOTHING = "nothing-to-tune"
"""The code of the finding that says so, which is shown before all others."""
