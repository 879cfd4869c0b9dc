"""The content and the mathematics of a front, and its forms as a table and a plot."""
