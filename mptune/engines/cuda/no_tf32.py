"""How a process is started whose CUDA libraries use no TF32. Imports nothing: a search's process starts first."""

from __future__ import annotations

from collections.abc import Mapping

NO_TF32: Mapping[str, str] = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Environment variable that keeps CUDA's libraries from TF32. cuBLAS does not always obey it."""
