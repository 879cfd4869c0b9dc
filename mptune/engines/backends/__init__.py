"""What builds and runs engines: ONNX Runtime, TensorRT, TensorRT-RTX, and what is installed beside mptune."""
