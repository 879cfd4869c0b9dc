"""TensorRT engines as one side of a comparison."""
