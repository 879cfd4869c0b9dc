"""What is wrong that no plan repairs: two sets of outputs, or two models, compared and the difference explained."""
