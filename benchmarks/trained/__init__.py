"""Trained networks that ship inside Python packages: mptune and three converters on each of them.

``python -m benchmarks.trained --help``.
"""
