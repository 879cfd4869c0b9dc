"""Export a ResNet-50 (He et al., arXiv 1512.03385; strides in the 3x3 convolutions) and calibration images.

No trained weights travel with mptune, so they are drawn: convolutions as He et al. initialise them, batch-norm gains
log-normal, smaller at the end of each block, so that blocks differ as trained ones do. The running statistics are those
of the calibration images' kind (1/f noise, the spectrum of natural scenes), so that activations stay as large as in
a trained network. The export folds the norms into the convolutions. Latency does not depend on the values; errors are
this network's, not a trained one's.

    python -m benchmarks.models.resnet50 --out resnet50 --batch 8     # resnet50.onnx (102 MB) and resnet50.npz
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models.exporting import export, parse
from benchmarks.models.vit_s import natural_noise

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, blocks and stride of each stage."""

EXPANSION = 4


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = width * EXPANSION
        self.conv1, self.norm1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.last_norm = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.relu = nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.last_norm(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        blocks, before = [], 64
        for width, count, stride in STAGES:
            for index in range(count):
                blocks.append(Bottleneck(before, width, stride if index == 0 else 1))
                before = width * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.pool(self.relu(self.norm(self.conv(image)))))
        return self.head(x.mean((2, 3)))


def draw_weights(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, -1.0 if name.endswith("last_norm") else 0.0, 0.5)
            module.weight.data.exp_()
            nn.init.normal_(module.bias, 0.0, 0.1)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.02)
            nn.init.zeros_(module.bias)


def settle_norms(model: nn.Module, *inputs: torch.Tensor) -> None:
    """Give batch norms the statistics of one batch, and leave the model in evaluation mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the plain mean over the batches seen
            module.reset_running_stats()
    model.train()
    with torch.no_grad():
        model(*inputs)
    model.eval()


def main() -> None:
    options = parse(__doc__, "resnet50")
    model = ResNet50()
    draw_weights(model, options.seed)
    settle_norms(model, torch.from_numpy(natural_noise(16, options.seed + 2)))
    images = natural_noise(options.batch * options.samples, options.seed + 1)
    export(model, options, {"image": images}, ["logits"])


if __name__ == "__main__":
    main()
