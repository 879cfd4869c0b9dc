"""Export a one-stage detector: residual backbone, feature pyramid (Lin et al., arXiv 1612.03144), decoded boxes.

Heads for classes and for distances to a box's four sides at every position (Tian et al., FCOS, arXiv 1904.01355), the
distances as softmax expectations over 16 bins (Li et al., arXiv 2006.04388), on strides 8, 16 and 32. The graph decodes
them into corners in pixels and scores; it has no NMS. Weights are drawn by seed, batch norms calibrated: latency does
not depend on that; errors are this network's.

    python -m benchmarks.models.detector --out detector --batch 1     # detector.onnx (52 MB) and detector.npz
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models.blocks import Residual, normed
from benchmarks.models.exporting import export, parse
from benchmarks.models.resnet50 import settle_norms
from benchmarks.models.vit_s import natural_noise

SIZE, CLASSES, BINS, CHANNELS = 384, 20, 16, 128
WIDTHS, DEPTHS, STRIDES = (64, 128, 256, 512), (2, 2, 2, 2), (8, 16, 32)


class Head(nn.Module):
    """Two towers; shared by all levels, but for a scale of the distances in each."""

    def __init__(self) -> None:
        super().__init__()

        def tower(outputs: int) -> nn.Sequential:
            layers = [layer for _ in range(2) for layer in (normed(CHANNELS, CHANNELS, 3), nn.SiLU())]
            return nn.Sequential(*layers, nn.Conv2d(CHANNELS, outputs, 1))

        self.classes, self.sides = tower(CLASSES), tower(4 * BINS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.classes(x), self.sides(x)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(normed(3, WIDTHS[0], 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        stages, before = [], WIDTHS[0]
        for number, (width, depth) in enumerate(zip(WIDTHS, DEPTHS, strict=True)):
            blocks = [Residual(before if k == 0 else width, width, 2 if k == 0 and number else 1) for k in range(depth)]
            stages.append(nn.Sequential(*blocks))
            before = width
        self.stages = nn.ModuleList(stages)
        self.lateral = nn.ModuleList(nn.Conv2d(width, CHANNELS, 1) for width in WIDTHS[1:])
        self.smooth = nn.ModuleList(normed(CHANNELS, CHANNELS, 3) for _ in WIDTHS[1:])
        self.head = Head()
        self.register_buffer("bins", torch.arange(BINS).float())
        for level, stride in enumerate(STRIDES):
            at = (torch.arange(SIZE // stride).float() + 0.5) * stride
            y, x = torch.meshgrid(at, at, indexing="ij")
            self.register_buffer(f"centres{level}", torch.stack([x, y], -1).reshape(1, -1, 2))

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, features = self.stem(image), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        levels = [lateral(f) for lateral, f in zip(self.lateral, features[1:], strict=True)]
        for number in (1, 0):
            levels[number] = levels[number] + nn.functional.interpolate(levels[number + 1], scale_factor=2.0)
        boxes, scores = [], []
        for number, (level, smooth) in enumerate(zip(levels, self.smooth, strict=True)):
            classes, sides = self.head(torch.relu(smooth(level)))
            scores.append(classes.flatten(2).transpose(1, 2).sigmoid())
            bins = sides.flatten(2).transpose(1, 2).reshape(image.shape[0], -1, 4, BINS).softmax(-1)
            left, top, right, bottom = ((bins * self.bins).sum(-1) * STRIDES[number]).unbind(-1)
            x, y = getattr(self, f"centres{number}").unbind(-1)
            boxes.append(torch.stack([x - left, y - top, x + right, y + bottom], -1))
        return torch.cat(boxes, 1), torch.cat(scores, 1)


def main() -> None:
    options = parse(__doc__, "detector")
    torch.manual_seed(options.seed)
    model = Detector()
    with torch.no_grad():  # outputs that differ from place to place, as a trained detector's do
        for tower, gain in ((model.head.classes, 2.0), (model.head.sides, 3.0)):
            nn.init.normal_(tower[-1].weight, 0.0, gain / CHANNELS**0.5)
    images = natural_noise(options.batch * options.samples, options.seed + 1, (SIZE, SIZE))
    settle_norms(model, torch.from_numpy(images[:4]))
    export(model.eval(), options, {"image": images}, ["boxes", "scores"])


if __name__ == "__main__":
    main()
