"""The questions of probes, written into the observing graph."""
