"""The finding of a comparison for each known cause of a difference, with the numbers that show it."""
