"""The durable record of a search, kept by Optuna."""
