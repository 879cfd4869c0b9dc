"""Layers that several of these networks are made of."""

from __future__ import annotations

import torch
from torch import nn


def normed(before: int, after: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(after))


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = normed(before, after, 3, stride), normed(after, after, 3)
        self.shortcut = nn.Sequential() if stride == 1 and before == after else normed(before, after, 1, stride)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.second(self.relu(self.first(x))) + self.shortcut(x))
