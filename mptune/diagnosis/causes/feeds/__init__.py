"""Ways in which a deployment may feed the same samples otherwise, each as what the model is given then."""
