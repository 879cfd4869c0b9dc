"""An ONNX file, checked and typed."""
