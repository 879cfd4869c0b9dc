"""Who builds, runs and times a plan, for one target."""
