"""What `mptune export --for` writes: parsed by TensorRT-RTX, and run against recorded surfaces of TensorRT."""
