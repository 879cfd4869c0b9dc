"""Which groups are to blame for plans that fail: group testing, and what it is used for."""
