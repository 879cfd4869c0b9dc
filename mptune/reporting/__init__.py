"""Layer 4: what a person or a script gets to see."""
