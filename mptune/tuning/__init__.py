"""Floor 3: which plans to evaluate, and what the evaluations say. The only floor that knows Optuna."""
