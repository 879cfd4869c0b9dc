"""The ONNX files that mptune writes."""
