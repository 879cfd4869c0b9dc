"""What several of the networks are made of, and ONNX operators that torch alone has no function for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class ConvBnAct(nn.Sequential):
    """Convolution, batch norm and activation, as detectors stack them."""

    def __init__(self, before: int, after: int, kernel: int = 3, stride: int = 1, act: type[nn.Module] = nn.SiLU):
        super().__init__(
            nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(after), act()
        )


class BasicBlock(nn.Module):
    """ResNet's block; the first of a stage halves the image."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        return functional.relu(self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))) + skip)


class Attention(nn.Module):
    """Multi-head attention written out: four linear layers, two products, a softmax."""

    def __init__(self, width: int, heads: int, context: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(context or width, width, bias=False)
        self.v = nn.Linear(context or width, width)
        self.out = nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = self.split(self.q(x)), self.split(self.k(context)), self.split(self.v(context))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores + mask
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Sequential):
    def __init__(self, width: int, hidden: int, act: nn.Module | None = None) -> None:
        super().__init__(nn.Linear(width, hidden), act or nn.GELU(), nn.Linear(hidden, width))


class NonMaxSuppression(torch.autograd.Function):
    """ONNX's operator, for the TorchScript exporter; run by torch, it keeps the best box of each class."""

    @staticmethod
    def forward(ctx: Any, boxes: Tensor, scores: Tensor, most: Tensor, iou: Tensor, score: Tensor) -> Tensor:
        batch, classes = torch.meshgrid(torch.arange(scores.shape[0]), torch.arange(scores.shape[1]), indexing="ij")
        return torch.stack((batch.flatten(), classes.flatten(), scores.argmax(-1).flatten()), 1)

    @staticmethod
    def symbolic(g: Any, *values: Any) -> Any:
        return g.op("NonMaxSuppression", *values)


class RoiAlign(torch.autograd.Function):
    """ONNX's operator, for the TorchScript exporter; run by torch, it gives zeros of the right shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boxes: Tensor, batch: Tensor, size: int, scale: float) -> Tensor:
        return x.new_zeros(boxes.shape[0], x.shape[1], size, size)

    @staticmethod
    def symbolic(g: Any, x: Any, boxes: Any, batch: Any, size: int, scale: float) -> Any:
        return g.op(
            "RoiAlign", x, boxes, batch,
            output_height_i=size, output_width_i=size, sampling_ratio_i=2, spatial_scale_f=scale,
        )  # fmt: skip
