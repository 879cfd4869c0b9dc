"""Shared by the scripts of torch models: their options, and the two files that they write."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def parse(description: str | None, stem: str, depth: int | None = None) -> argparse.Namespace:
    """The options ``out``, ``batch``, ``samples``, ``opset`` and ``seed``; ``depth`` where a default is given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(stem), help="written with the suffixes .onnx and .npz")
    parser.add_argument("--batch", type=int, default=8, help="static batch")
    parser.add_argument("--samples", type=int, default=16, help="calibration batches")
    parser.add_argument("--opset", type=int, default=17)
    parser.add_argument("--seed", type=int, default=0)
    if depth is not None:
        parser.add_argument("--depth", type=int, default=depth, help="layers that repeat")
    return parser.parse_args()


def draw_uneven_weights(model: nn.Module, seed: int, draw_rest: Callable[[torch.Tensor], object]) -> None:
    """Weights of a transformer whose norms scale their features unevenly, as trained ones do.

    Args:
        model: its parameters are drawn in their order.
        seed: of the drawing.
        draw_rest: draws, in place, what is neither a norm's scale nor a bias.
    """
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            nn.init.normal_(parameter, 0.0, 0.5)
            parameter.data.exp_()
        elif name.endswith("bias"):
            nn.init.normal_(parameter, 0.0, 0.02)
        else:
            draw_rest(parameter)


def export(
    model: nn.Module, options: argparse.Namespace, samples: Mapping[str, np.ndarray], outputs: Sequence[str], **how: Any
) -> None:
    """Write the model, traced with the first batch of the samples, and the samples.

    Args:
        model: in evaluation mode.
        options: of ``parse``.
        samples: input -> ``batch * samples`` rows.
        outputs: names.
        how: more options of ``torch.onnx.export``.
    """
    example = tuple(torch.from_numpy(rows[: options.batch]) for rows in samples.values())
    how |= {"input_names": list(samples), "output_names": list(outputs), "opset_version": options.opset}
    torch.onnx.export(model, example, str(options.out.with_suffix(".onnx")), dynamo=False, **how)
    np.savez(options.out.with_suffix(".npz"), **samples)
