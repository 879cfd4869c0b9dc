"""Layer 1: ONNX models and precision plans in, ONNX models out. No device, no Optuna."""
