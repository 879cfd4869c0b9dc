"""TensorRT and TensorRT-RTX: build, load, run, inspect."""
