"""Export torchvision's RAFT-small (Teed and Deng, arXiv 2003.12039; 12 updates) and pairs of shifted images.

The weights are torchvision's own initialisation, drawn by seed. The second image of a pair is the first one, shifted by
up to eight pixels, with a little noise. GridSample looks the correlations up, 48 times: ONNX Runtime's CUDA provider
has no FP16 kernel for it. Needs torchvision.

    python -m benchmarks.models.raft --out raft --batch 1     # raft.onnx and raft.npz
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torchvision.models.optical_flow import raft_small

from benchmarks.models.exporting import export, parse
from benchmarks.models.vit_s import natural_noise

SIZE = (128, 160)
SHIFT = 8
UPDATES = 4


class LastFlow(nn.Module):
    """The network with its last prediction as the only output: flow, float32 (batch, 2, height, width), in pixels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.network(first, second, num_flow_updates=UPDATES)[-1]


def shifted_pairs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images in -1..1 and the same images shifted by up to ``SHIFT`` pixels: float32 (count, 3, height, width) each."""
    rng = np.random.default_rng(seed)
    first = np.clip(natural_noise(count, seed, SIZE) / 3.0, -1.0, 1.0)
    moved = [np.roll(image, tuple(rng.integers(-SHIFT, SHIFT + 1, 2)), (1, 2)) for image in first]
    second = np.stack(moved) + 0.01 * rng.standard_normal(first.shape)
    return first.astype(np.float32), np.clip(second, -1.0, 1.0).astype(np.float32)


def main() -> None:
    options = parse(__doc__, "raft")
    torch.manual_seed(options.seed)
    model = LastFlow(raft_small(weights=None)).eval()
    first, second = shifted_pairs(options.batch * options.samples, options.seed + 1)
    export(model, options, {"first": first, "second": second}, ["flow"])


if __name__ == "__main__":
    main()
