"""Sketches of outputs: what they look like beside the reference, in kilobytes."""
