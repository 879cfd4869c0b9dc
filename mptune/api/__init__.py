"""The public functions, from search to export, and what callers give them. They only call the layers below."""
