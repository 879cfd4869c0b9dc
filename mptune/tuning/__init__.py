"""Layer 3: which plans to evaluate, and what the evaluations say. The only layer that knows Optuna."""
