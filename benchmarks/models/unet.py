"""Export a U-Net as latent diffusion has it (Rombach et al., arXiv 2112.10752), with noisy latents and text features.

Residual blocks of GroupNorm, SiLU and 3x3 convolutions that take in the time step, transformer blocks with self- and
cross-attention and a gated feed-forward layer, three resolutions, and skip connections from each block of the way down
to one of the way up. Weights are drawn, norms uneven as trained ones are; so it denoises nothing: latency does not
depend on that; errors are this network's.

    python -m benchmarks.models.unet --out unet --batch 1     # unet.onnx (28 MB) and unet.npz
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from benchmarks.models.exporting import draw_uneven_weights, export, parse

CHANNELS, SIZE, LATENT = (64, 128, 192), 32, 4
TEXT, WORDS, HEADS, NORMS = 96, 16, 4, 16
"""Features of a word, words of a prompt, heads of attention, and groups of a GroupNorm."""


class ResidualBlock(nn.Module):
    """Two convolutions, the time step added between them."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(NORMS, before), nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.norm2, self.conv2 = nn.GroupNorm(NORMS, after), nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(self.act(self.norm1(x))) + self.time(self.act(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(self.act(self.norm2(y)))


class Attention(nn.Module):
    """Several heads; keys and values of ``other``, which for self-attention is the same."""

    def __init__(self, channels: int, other: int) -> None:
        super().__init__()
        self.query = nn.Linear(channels, channels, bias=False)
        self.key, self.value = (nn.Linear(other, channels, bias=False) for _ in range(2))
        self.out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        width = x.shape[2] // HEADS
        query, key, value = (
            part.reshape(part.shape[0], part.shape[1], HEADS, width).transpose(1, 2)
            for part in (self.query(x), self.key(other), self.value(other))
        )
        attended = (query @ key.transpose(-2, -1) * width**-0.5).softmax(-1) @ value
        return self.out(attended.transpose(1, 2).reshape(x.shape))


class TransformerBlock(nn.Module):
    """Self-attention, attention to the words, and a feed-forward layer gated by GELU, over all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.enter = nn.GroupNorm(NORMS, channels), nn.Conv2d(channels, channels, 1)
        self.norm1, self.inner = nn.LayerNorm(channels), Attention(channels, channels)
        self.norm2, self.cross = nn.LayerNorm(channels), Attention(channels, TEXT)
        self.norm3, self.wide = nn.LayerNorm(channels), nn.Linear(channels, 8 * channels)
        self.narrow, self.leave = nn.Linear(4 * channels, channels), nn.Conv2d(channels, channels, 1)
        self.act = nn.GELU()

    def forward(self, image: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        x = self.enter(self.norm(image)).flatten(2).transpose(1, 2)
        normed = self.norm1(x)
        x = x + self.inner(normed, normed)
        x = x + self.cross(self.norm2(x), words)
        value, gate = self.wide(self.norm3(x)).chunk(2, -1)
        x = x + self.narrow(value * self.act(gate))
        return image + self.leave(x.transpose(1, 2).reshape(image.shape))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        narrow, middle, wide = CHANNELS
        time = 4 * narrow
        self.time1, self.time2, self.act = nn.Linear(narrow, time), nn.Linear(time, time), nn.SiLU()
        self.enter = nn.Conv2d(LATENT, narrow, 3, padding=1)
        pairs = ((narrow, narrow), (narrow, middle), (middle, wide))
        self.down = nn.ModuleList(ResidualBlock(a, b, time) for a, b in pairs)
        self.attend_down = nn.ModuleList(TransformerBlock(b) for _, b in pairs)
        self.smaller = nn.ModuleList(nn.Conv2d(c, c, 3, stride=2, padding=1) for c in CHANNELS[:2])
        self.middle = ResidualBlock(wide, wide, time)
        self.attend_middle = TransformerBlock(wide)
        self.middle2 = ResidualBlock(wide, wide, time)
        pairs = ((wide + wide, wide), (wide + middle, middle), (middle + narrow, narrow))
        self.up = nn.ModuleList(ResidualBlock(a, b, time) for a, b in pairs)
        self.attend_up = nn.ModuleList(TransformerBlock(b) for _, b in pairs)
        self.larger = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for c in (wide, middle))
        self.norm, self.leave = nn.GroupNorm(NORMS, narrow), nn.Conv2d(narrow, LATENT, 3, padding=1)
        rates = torch.exp(-math.log(1e4) * torch.arange(narrow // 2) / (narrow // 2))
        self.register_buffer("rates", rates)

    def forward(self, latent: torch.Tensor, step: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        angles = step[:, None] * self.rates
        time = self.time2(self.act(self.time1(torch.cat([angles.cos(), angles.sin()], 1))))
        x, skipped = self.enter(latent), []
        for level, (block, attend) in enumerate(zip(self.down, self.attend_down, strict=True)):
            x = attend(block(x, time), words)
            skipped.append(x)
            if level < len(self.smaller):
                x = self.smaller[level](x)
        x = self.middle2(self.attend_middle(self.middle(x, time), words), time)
        for level, (block, attend) in enumerate(zip(self.up, self.attend_up, strict=True)):
            x = attend(block(torch.cat([x, skipped.pop()], 1), time), words)
            if level < len(self.larger):
                x = self.larger[level](nn.functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.leave(self.act(self.norm(x)))


def draw_rest(weight: torch.Tensor) -> None:
    """Variances are kept; what a residual adds is scaled down, or the values would grow from block to block."""
    if weight.dim() > 1:
        nn.init.normal_(weight, 0.0, 0.6 / math.sqrt(weight[0].numel()))


def inputs(count: int, seed: int) -> dict[str, np.ndarray]:
    """Noise with a smooth picture behind it, steps from 0 to 999, and features of words."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(size=(count, LATENT, SIZE // 8, SIZE // 8)).repeat(8, 2).repeat(8, 3)
    steps = rng.uniform(0.0, 999.0, count)
    share = np.cos(0.5 * np.pi * steps / 1000.0)[:, None, None, None]
    latents = share * coarse + np.sqrt(1.0 - share**2) * rng.normal(size=(count, LATENT, SIZE, SIZE))
    words = rng.normal(size=(count, WORDS, TEXT))
    return {name: a.astype(np.float32) for name, a in (("latent", latents), ("step", steps), ("words", words))}


def main() -> None:
    options = parse(__doc__, "unet")
    torch.manual_seed(options.seed)
    model = UNet().eval()
    draw_uneven_weights(model, options.seed, draw_rest)
    export(model, options, inputs(options.batch * options.samples, options.seed + 1), ["noise"])


if __name__ == "__main__":
    main()
