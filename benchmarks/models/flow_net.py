"""Export an optical flow network that matches globally, after GMFlow and UniMatch (Xu et al., arXiv 2111.13680 and
2211.05783), with pairs of frames.

A convolutional encoder to an eighth of the size, transformer layers over both frames (self- and cross-attention), a
softmax over the correlation of all pairs of positions whose expectation is the flow, propagation of the flow by
self-attention, and convex upsampling. Weights are drawn, gains log-normal, batch norms calibrated; the second frame is
the first one moved by a smooth field. So the network matches, but was never trained: latency does not depend on that;
errors are this network's.

    python -m benchmarks.models.flow_net --out flow_net --batch 8     # flow_net.onnx (7 MB) and flow_net.npz
    python -m benchmarks.models.flow_net --out flow_deep --batch 1 --depth 6 --opset 16     # more than 100 layer groups
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.ndimage import map_coordinates, zoom
from torch import nn

from benchmarks.models.blocks import Residual, normed
from benchmarks.models.exporting import export, parse
from benchmarks.models.resnet50 import settle_norms
from benchmarks.models.vit_s import natural_noise

HEIGHT, WIDTH, SCALE, CHANNELS = 160, 224, 8, 128
SHARPNESS = 0.3
"""Factor of the scores before the softmax over all positions: untrained features differ more than trained ones."""

LARGEST_MOTION = 16.0
"""Pixels."""


class Attention(nn.Module):
    """One head, with a residual; keys and values of ``other``, which for self-attention is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(CHANNELS, CHANNELS, bias=False) for _ in range(3))
        self.merge, self.norm = nn.Linear(CHANNELS, CHANNELS, bias=False), nn.LayerNorm(CHANNELS)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(other).transpose(-2, -1) * CHANNELS**-0.5
        return x + self.norm(self.merge(scores.softmax(-1) @ self.value(other)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cross = Attention(), Attention()
        self.fc1, self.fc2 = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)
        self.norm, self.act = nn.LayerNorm(CHANNELS), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both frames lie one after the other in the batch."""
        x = self.inner(x, x)
        first, second = x.chunk(2)
        x = self.cross(x, torch.cat([second, first]))
        return x + self.norm(self.fc2(self.act(self.fc1(x))))


class FlowNet(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.stem, self.relu = normed(3, 64, 7, 2), nn.ReLU()
        self.encoder = nn.Sequential(
            Residual(64, 64, 1), Residual(64, 96, 2), Residual(96, 96, 1), Residual(96, CHANNELS, 2)
        )
        self.out = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.sharpness = nn.Parameter(torch.tensor(SHARPNESS))
        self.query, self.key = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.mask1 = nn.Conv2d(CHANNELS + 2, 256, 3, 1, 1)
        self.mask2 = nn.Conv2d(256, SCALE**2 * 9, 1)
        rows, columns = torch.meshgrid(torch.arange(HEIGHT // SCALE), torch.arange(WIDTH // SCALE), indexing="ij")
        self.register_buffer("grid", torch.stack([columns, rows], -1).reshape(1, -1, 2).float())
        row, column = np.mgrid[0 : HEIGHT // SCALE, 0 : WIDTH // SCALE].reshape(2, -1, 1)
        row, column = row / (HEIGHT // SCALE), column / (WIDTH // SCALE)
        waves = 2.0 * np.pi * 2.0 ** np.arange(CHANNELS // 4 // 4)
        position = np.concatenate([f(p * waves) for p in (row, column) for f in (np.sin, np.cos)], 1)
        self.register_buffer("position", torch.from_numpy(np.tile(position, (1, 4))[None].astype(np.float32)))

    def forward(self, image1: torch.Tensor, image2: torch.Tensor) -> torch.Tensor:
        x = self.out(self.encoder(self.relu(self.stem(torch.cat([image1, image2])))))
        both, channels, height, width = x.shape
        x = x.flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            x = layer(x)
        first, second = x.chunk(2)
        matching = (first @ second.transpose(-2, -1) * CHANNELS**-0.5 * self.sharpness).softmax(-1)
        flow = matching @ self.grid - self.grid
        spread = (self.query(first) @ self.key(first).transpose(-2, -1) * CHANNELS**-0.5).softmax(-1)
        flow = (spread @ flow).transpose(1, 2).reshape(both // 2, 2, height, width)
        features = first.transpose(1, 2).reshape(both // 2, channels, height, width)
        return self.upsample(flow, self.mask2(self.relu(self.mask1(torch.cat([features, flow], 1)))))

    def upsample(self, flow: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Each fine vector is a convex combination of the nine coarse ones around it (RAFT, arXiv 2003.12039)."""
        batch, _, height, width = flow.shape
        shares = mask.reshape(batch, 1, 9, SCALE, SCALE, height, width).softmax(2)
        padded = nn.functional.pad(flow * SCALE, (1, 1, 1, 1))
        around = [padded[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        fine = (shares * torch.stack(around, 2).reshape(batch, 2, 9, 1, 1, height, width)).sum(2)
        return fine.permute(0, 1, 4, 2, 5, 3).reshape(batch, 2, height * SCALE, width * SCALE)


def draw_weights(model: FlowNet, seed: int) -> None:
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
        elif isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.normal_(module.weight, 0.0, 0.5)
            module.weight.data.exp_()
            nn.init.normal_(module.bias, 0.0, 0.1)
    # Otherwise attention saturates and magnifies every rounding, which no trained network does.
    with torch.no_grad():
        model.out.weight *= 0.4
        for name, parameter in model.named_parameters():
            if name.endswith(("query.weight", "key.weight")):
                parameter *= 0.5


def frame_pairs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames and the same moved by up to 16 pixels along a smooth field: float32 (count, 3, 160, 224) each."""
    rng = np.random.default_rng(seed)
    first = natural_noise(count, seed, (HEIGHT, WIDTH))
    second = np.empty_like(first)
    places = np.mgrid[0:HEIGHT, 0:WIDTH].astype(float)
    for frame, moved in zip(first, second, strict=True):
        field = rng.uniform(-LARGEST_MOTION, LARGEST_MOTION, (2, 5, 7))
        field = np.stack([zoom(f, (HEIGHT / 5, WIDTH / 7), order=3) for f in field])
        for channel, into in zip(frame, moved, strict=True):
            into[:] = map_coordinates(channel, places + field, order=1, mode="reflect")
    return first, second


def main() -> None:
    options = parse(__doc__, "flow_net", depth=2)
    torch.manual_seed(options.seed)  # biases are drawn when layers are made
    model = FlowNet(options.depth)
    draw_weights(model, options.seed)
    settle_norms(model, *map(torch.from_numpy, frame_pairs(8, options.seed + 2)))
    first, second = frame_pairs(options.batch * options.samples, options.seed + 1)
    export(model, options, {"image1": first, "image2": second}, ["flow"])


if __name__ == "__main__":
    main()
