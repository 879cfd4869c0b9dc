"""A device in host memory: CUDA's runtime, TensorRT's surface on TensorRT-RTX's builder, ONNX Runtime's outputs.

``cuda`` and ``engine`` hold the order of calls and the lifetimes that NVIDIA's headers ask for: what they leave
undefined raises, and what they refuse is kept (``handles``). ``machines`` makes this process and its workers believe
that they are on one of three machines.
"""
