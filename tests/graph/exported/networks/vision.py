"""Backbones, a diffusion UNet, points, and what exporters of other frameworks write for images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.graph.exported.networks.parts import Attention, BasicBlock, ConvBnAct, Mlp


class SwinBlock(nn.Module):
    def __init__(self, width: int, heads: int, window: int, shift: int, size: int) -> None:
        super().__init__()
        self.window, self.shift, self.size = window, shift, size
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.1)
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        offset = grid[:, :, None] - grid[:, None, :] + window - 1
        self.register_buffer("index", offset[0] * (2 * window - 1) + offset[1])
        region = torch.zeros(size, size)
        for k, part in enumerate((slice(-window), slice(-window, -shift), slice(-shift, None)) if shift else ()):
            for j, other in enumerate((slice(-window), slice(-window, -shift), slice(-shift, None))):
                region[part, other] = 3 * k + j
        region = self.windows(region[None, :, :, None]).squeeze(-1)
        self.register_buffer("mask", (region[:, None, :] != region[:, :, None]).float() * -100.0)
        self.mlp = Mlp(width, 2 * width)

    def windows(self, x: Tensor) -> Tensor:
        n, w = self.size // self.window, self.window
        return x.view(-1, n, w, n, w, x.shape[-1]).transpose(2, 3).reshape(-1, w * w, x.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        n, w, size, width = self.size // self.window, self.window, self.size, x.shape[-1]
        skip = x
        x = self.norm1(x)
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = self.windows(x)
        q, k, v = self.qkv(x).view(-1, w * w, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (width // self.heads) ** -0.5) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index.view(-1)].view(w * w, w * w, -1).permute(2, 0, 1).unsqueeze(0)
        if self.shift:
            scores = scores.view(-1, n * n, self.heads, w * w, w * w) + self.mask[None, :, None]
            scores = scores.view(-1, self.heads, w * w, w * w)
        x = self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, w * w, width))
        x = x.view(-1, n, n, w, w, width).transpose(2, 3).reshape(-1, size, size, width)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        x = skip + x
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    """Two stages of a plain and a shifted block, patches merged between them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.norm0 = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        self.stage1 = nn.Sequential(SwinBlock(width, 2, 4, 0, 8), SwinBlock(width, 2, 4, 2, 8))
        self.norm1, self.reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)
        self.stage2 = nn.Sequential(SwinBlock(2 * width, 4, 2, 0, 4), SwinBlock(2 * width, 4, 2, 1, 4))
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stage1(self.norm0(self.embed(image).permute(0, 2, 3, 1)))
        x = torch.cat((x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]), -1)
        x = self.stage2(self.reduce(self.norm1(x)))
        return self.head(self.norm(x).mean((1, 2)))


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.mlp = nn.LayerNorm(width, eps=1e-6), Mlp(width, 4 * width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))) * self.scale
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.Module):
    """LayerNorm over axis 1, written out, as ConvNeXt does between its stages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNext(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 4, 4), ChannelNorm(width), ConvNextBlock(width), ConvNextBlock(width),
            ChannelNorm(width), nn.Conv2d(width, 2 * width, 2, 2), ConvNextBlock(2 * width),
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.net(image).mean((2, 3))))


class ResBlock(nn.Module):
    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, before), nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.norm2, self.conv2 = nn.GroupNorm(8, after), nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(functional.silu(self.norm1(x))) + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(functional.silu(self.norm2(y)))


class GeGlu(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.enter(x).chunk(2, -1)
        return self.leave(x * functional.gelu(gate))


class SpatialTransformer(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width, eps=1e-6)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention, self.cross, self.mlp = Attention(width, 4), Attention(width, 4, context), GeGlu(width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        height, skip = x.shape[2], x
        x = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        x = x + self.attention(self.norms[0](x))
        x = x + self.cross(self.norms[1](x), context)
        x = x + self.mlp(self.norms[2](x))
        return skip + self.leave(x.transpose(1, 2).unflatten(2, (height, -1)))


class DiffusionUnet(nn.Module):
    """Stable Diffusion's UNet in small: sine time embedding, GroupNorm, cross attention, GEGLU, one level down."""

    def __init__(self, width: int = 32, context: int = 24) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.enter = nn.Conv2d(4, width, 3, padding=1)
        self.down1, self.att1 = ResBlock(width, width, 2 * width), SpatialTransformer(width, context)
        self.down = nn.Conv2d(width, width, 3, 2, 1)
        self.middle = ResBlock(width, 2 * width, 2 * width)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up1 = ResBlock(2 * width, width, 2 * width)
        self.norm, self.leave = nn.GroupNorm(8, width), nn.Conv2d(width, 4, 3, padding=1)
        self.register_buffer("frequencies", torch.exp(torch.arange(width // 2) * (-9.21 / (width // 2))))

    def forward(self, latent: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        angle = timestep.float()[:, None] * self.frequencies
        time = self.time(torch.cat((angle.cos(), angle.sin()), -1))
        x = self.enter(latent)
        skip = self.att1(self.down1(x, time), text)
        x = self.middle(self.down(skip), time)
        x = self.up(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = self.up1(torch.cat((x, skip), 1), time)
        return self.leave(functional.silu(self.norm(x)))


class Abstraction(nn.Module):
    """PointNet++'s set abstraction: the farthest points, their nearest neighbours, an MLP, the maximum."""

    def __init__(self, before: int, after: int, points: int, neighbours: int) -> None:
        super().__init__()
        self.points, self.neighbours = points, neighbours
        self.mlp = nn.Sequential(
            nn.Conv2d(before + 3, after, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
        )  # fmt: skip

    def forward(self, xyz: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        distance = (xyz - xyz[:, :1]).pow(2).sum(-1)
        chosen = [torch.zeros_like(distance[:, :1], dtype=torch.int64)]
        for _ in range(self.points - 1):
            farthest = distance.argmax(1, keepdim=True)
            chosen.append(farthest)
            point = xyz.gather(1, farthest.unsqueeze(-1).expand(-1, -1, 3))
            distance = torch.minimum(distance, (xyz - point).pow(2).sum(-1))
        index = torch.cat(chosen, 1)
        center = xyz.gather(1, index.unsqueeze(-1).expand(-1, -1, 3))
        squares = (center.unsqueeze(2) - xyz.unsqueeze(1)).pow(2).sum(-1)
        near = squares.topk(self.neighbours, dim=-1, largest=False).indices.flatten(1)
        local = xyz.gather(1, near.unsqueeze(-1).expand(-1, -1, 3)).unflatten(1, (self.points, -1)) - center.unsqueeze(
            2
        )
        own = features.gather(1, near.unsqueeze(-1).expand(-1, -1, features.shape[-1])).unflatten(1, (self.points, -1))
        x = self.mlp(torch.cat((local, own), -1).permute(0, 3, 1, 2))
        return center, x.amax(-1).transpose(1, 2)


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Abstraction(3, 32, 8, 8), Abstraction(32, 64, 4, 4)
        self.head = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, cloud: Tensor) -> Tensor:
        xyz, features = self.first(cloud, cloud)
        xyz, features = self.second(xyz, features)
        return self.head(features.amax(1)).log_softmax(-1)


class ShapeArithmetic(nn.Module):
    """A segmentation net whose sizes are computed in the graph: Shape, Cast, Mul, Floor, Cast, Resize."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.Sequential(ConvBnAct(3, width, 3, 2, nn.ReLU), BasicBlock(width, width, 2))
        self.up = nn.ModuleList(ConvBnAct(width, width, 3, 1, nn.ReLU) for _ in "ab")
        self.head = nn.Conv2d(width, 5, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.down(image)
        for layer in self.up:
            x = functional.interpolate(
                x, scale_factor=2.0, mode="bilinear", align_corners=False, recompute_scale_factor=True
            )
            x = layer(x)
        x = functional.interpolate(x, size=image.shape[-2:], mode="bilinear", align_corners=True)
        return self.head(x).softmax(1)


class ChannelsLast(nn.Module):
    """An image as Keras gives it, height, width, channels: a Transpose around what convolves, products at the end."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = ConvBnAct(3, width, 3, 2, nn.ReLU6)
        self.depthwise = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1, groups=width, bias=False), nn.BatchNorm2d(width), nn.ReLU6()
        )
        self.point, self.back = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.last = ConvBnAct(width, 64, 3, 2, nn.Hardswish)
        self.head = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        y = self.depthwise(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = x + self.back(functional.relu6(self.point(y)))
        x = self.last(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.head(x.mean((1, 2))).softmax(-1)
