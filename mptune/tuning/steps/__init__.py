"""The steps of a run, in order."""
