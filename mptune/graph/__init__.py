"""Floor 1: ONNX in, ONNX out. Pure functions of models and plans; no device, no Optuna."""
