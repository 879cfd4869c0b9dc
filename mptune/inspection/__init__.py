"""What a model is made of, as a search would see it."""
