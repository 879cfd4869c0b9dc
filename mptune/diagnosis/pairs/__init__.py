"""Two models side by side: nodes that differ, and the first values that do."""
