"""mptune against what others would do with the same model, by one harness: ``python -m benchmarks.peers --help``."""
