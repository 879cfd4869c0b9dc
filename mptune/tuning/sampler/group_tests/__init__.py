"""Which groups are to blame for plans that fail, or for how much of an error: group tests, and their uses."""
