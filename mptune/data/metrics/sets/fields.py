"""Metrics of dense outputs: end-point error of optical flow, cosine of embeddings, PSNR and SSIM of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mptune.data.metrics.sets.targets_of import pairs, same_shape

MOST_DB = 120.0
"""PSNR of images that are equal: noise below 1e-12 of the squared peak counts as this much."""

_SIGMA, _TRUNCATE, _K1, _K2 = 1.5, 3.5, 0.01, 0.03
"""SSIM's window (11 pixels wide) and constants, as in the paper."""


def flow_axis(array: np.ndarray) -> int | None:
    """The axis of the two components of optical flow, [N, 2, H, W] or [N, H, W, 2]; None where it is none."""
    if array.dtype.kind != "f" or array.ndim != 4:
        return None
    return 1 if array.shape[1] == 2 else 3 if array.shape[3] == 2 else None


def endpoint_error(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Mean Euclidean distance of flow vectors, in pixels, over all samples; the largest over the outputs.

    Flow is [N, 2, H, W] or [N, H, W, 2], each on its own side. Pixels whose target is not finite are left out (Baker et
    al., A Database and Evaluation Methodology for Optical Flow, 2011).
    """
    means = []

    def fits(array: np.ndarray) -> bool:
        return flow_axis(array) is not None

    for name, output, target, _ in pairs(
        "endpoint_error", outputs, references, labels, fits, "shape (N, 2, H, W) or (N, H, W, 2)", is_dense=True
    ):
        got = np.moveaxis(output, flow_axis(output) or 1, 1).astype(np.float64)
        axis = flow_axis(target.astype(np.float64))
        wanted = target if axis is None else np.moveaxis(target, axis, 1)
        same_shape("endpoint_error", name, got, wanted)
        valid = np.isfinite(wanted).all(axis=1)
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.hypot(*np.moveaxis(got - wanted, 1, 0))[valid]
        means.append(float(distance.mean()) if distance.size else 0.0)
    return float(np.max(means))


def cosine_similarity(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Mean over the rows of the cosine between an embedding (the last axis) and its target; the smallest output's.

    Two rows of zeros have cosine 1, a row of zeros and another one 0.
    """
    means = []
    for name, output, target, _ in pairs(
        "cosine", outputs, references, labels, _is_rows, "embeddings [N, ..., D]", is_dense=True
    ):
        same_shape("cosine", name, output, target)
        a, b = output.astype(np.float64), target.astype(np.float64)
        norms = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
        product, both = (a * b).sum(axis=-1), norms[0] * norms[1]
        zero = (norms[0] == 0) & (norms[1] == 0)
        values = np.where(zero, 1.0, np.divide(product, both, out=np.zeros_like(product), where=both != 0))
        means.append(float(values.mean()))
    return float(np.min(means))


def _is_rows(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and array.ndim >= 2 and array.shape[-1] > 1


def _is_image(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and array.ndim == 4


def _peaks(target: np.ndarray) -> float:
    """The range of the pixel values: 1 or 255 where the target lies within those, else what it spans."""
    low, high = float(np.nanmin(target)), float(np.nanmax(target))
    if low >= 0.0 and high <= 1.0:
        return 1.0
    if low >= 0.0 and 2.0 < high <= 255.0:
        return 255.0
    return max(high - low, 1e-12)


def psnr(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Peak signal to noise ratio in dB, the mean over the images, at most 120; the smallest over the outputs.

    Images are [N, C, H, W] or [N, H, W, C]. The peak is 1 or 255 where the target's values lie in 0..1 or 0..255, else
    the range of its values.
    """

    def decibels(output: np.ndarray, target: np.ndarray) -> float:
        noise = ((output - target) ** 2).reshape(len(output), -1).mean(axis=1) / _peaks(target) ** 2
        return float(np.mean(-10.0 * np.log10(np.maximum(noise, 10.0 ** (-MOST_DB / 10.0)))))

    return _least("psnr", outputs, references, labels, decibels)


def ssim(
    outputs: Mapping[str, Any], references: Mapping[str, Any], inputs: Mapping[str, Any], labels: Mapping[str, Any]
) -> float:
    """Structural similarity, the mean over pixels, channels and images; the smallest over the outputs.

    Gaussian window with a standard deviation of 1.5 pixels, constants 0.01 and 0.03 (Wang et al., Image Quality
    Assessment: From Error Visibility to Structural Similarity, IEEE TIP 13, 2004, equation 13). Images and peak as for
    ``psnr``; channels are the axis of 1 to 4, axis 1 where both are.
    """
    return _least("ssim", outputs, references, labels, _ssim)


def _least(
    name: str,
    outputs: Mapping[str, Any],
    references: Mapping[str, Any],
    labels: Mapping[str, Any],
    similarity: Callable[[np.ndarray, np.ndarray], float],
) -> float:
    """The smallest similarity of an output that holds images, in FP64, and its target."""
    found = []
    for output_name, output, target, _ in pairs(
        name, outputs, references, labels, _is_image, "images [N, C, H, W]", is_dense=True
    ):
        same_shape(name, output_name, output, target)
        found.append(similarity(output.astype(np.float64), target.astype(np.float64)))
    return float(np.min(found))


def _ssim(x: np.ndarray, y: np.ndarray) -> float:
    from scipy.ndimage import gaussian_filter  # slow to import, and few searches need it

    last = y.shape[1] > 4 >= y.shape[3]
    sigma = (0.0, _SIGMA, _SIGMA, 0.0) if last else (0.0, 0.0, _SIGMA, _SIGMA)
    peak = _peaks(y)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.asarray(gaussian_filter(values, sigma, truncate=_TRUNCATE))

    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    c1, c2 = (_K1 * peak) ** 2, (_K2 * peak) ** 2
    return float((((2 * mx * my + c1) * (2 * cov + c2)) / ((mx * mx + my * my + c1) * (vx + vy + c2))).mean())
