"""BFLOAT16 in NumPy, which has no such type: the upper half of an FP32 number, as 16 bits.

``onnx`` from 1.19 on has it by ``ml_dtypes``; older ones, which mptune supports, do not.
"""

from __future__ import annotations

import numpy as np

_QUIET_NAN = 0x7FC0


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round FP32 to the nearest BFLOAT16, ties to even, as 16 bits (uint16); overflow gives infinity, NaN stays NaN."""
    values = np.asarray(values, np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    # Half of the last kept digit less one, and one more where that digit is odd. Finite values cannot wrap around.
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: np.ndarray = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    unordered = np.isnan(values)
    if unordered.any():
        sign = (bits >> np.uint32(16)).astype(np.uint16) & np.uint16(0x8000)
        rounded = np.where(unordered, sign | np.uint16(_QUIET_NAN), rounded)
    return rounded


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The FP32 numbers that BFLOAT16 bits are, exactly; uint16 in, the same shape out."""
    wide: np.ndarray = np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)
