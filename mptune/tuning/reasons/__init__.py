"""Why the front is as it is."""
