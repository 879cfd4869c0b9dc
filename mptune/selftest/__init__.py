"""The self-test: tiny models that are built, run, timed and checked on the engines of this machine."""
