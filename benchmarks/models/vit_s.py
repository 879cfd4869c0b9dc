"""Export a ViT-S/16 (Dosovitskiy et al., arXiv 2010.11929: width 384, 12 blocks, 6 heads) and calibration images.

No trained weights travel with mptune, so they are drawn: truncated normal with the width's standard deviation, as the
paper's code initialises them, and norm gains log-normal, so that the blocks differ as trained ones do. The images are
1/f noise, the spectrum of natural scenes (Field 1987), normalised per channel. Latency does not depend on either;
errors are this network's, not a trained one's.

    python -m benchmarks.models.vit_s --out vit_s --batch 8     # vit_s.onnx (88 MB) and vit_s.npz
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from benchmarks.models.exporting import draw_uneven_weights, export, parse

SIDE, PATCH = 224, 16


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 384, depth: int = 12, heads: int = 6, classes: int = 1000) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, PATCH, PATCH)
        self.position = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2 + 1, width))
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def natural_noise(count: int, seed: int, size: tuple[int, int] = (SIDE, SIDE)) -> np.ndarray:
    """Images with a 1/f amplitude spectrum: float32 (count, 3, height, width), each channel of unit variance."""
    rng = np.random.default_rng(seed)
    height, width = size
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    spectrum = np.fft.rfft2(rng.standard_normal((count, 3, height, width))) / frequency
    images = np.fft.irfft2(spectrum, size)
    return (images / images.std((2, 3), keepdims=True)).astype(np.float32)


def main() -> None:
    options = parse(__doc__, "vit_s")
    model = VisionTransformer().eval()
    draw_uneven_weights(model, options.seed, lambda weight: nn.init.trunc_normal_(weight, std=0.04))
    images = natural_noise(options.batch * options.samples, options.seed + 1)
    export(model, options, {"image": images}, ["logits"])


if __name__ == "__main__":
    main()
