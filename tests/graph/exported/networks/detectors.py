"""Detectors, a two-stage one, a transformer with queries, and a tracker."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.graph.exported.networks.parts import Attention, BasicBlock, ConvBnAct, Mlp, NonMaxSuppression, RoiAlign


class Split(nn.Module):
    """YOLO's C2f: half of the channels pass a bottleneck, everything is joined."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = ConvBnAct(width, width, 1)
        self.inner = nn.Sequential(ConvBnAct(width // 2, width // 2), ConvBnAct(width // 2, width // 2))
        self.leave = ConvBnAct(width * 3 // 2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.enter(x).chunk(2, 1)
        return self.leave(torch.cat((a, b, b + self.inner(b)), 1))


class Yolo(nn.Module):
    """Two levels, boxes as a distribution over distances (softmax), decoded against anchors; NMS in the graph."""

    def __init__(self, nms: bool, classes: int = 4, bins: int = 8, width: int = 32) -> None:
        super().__init__()
        self.nms, self.classes, self.bins = nms, classes, bins
        self.stem = nn.Sequential(ConvBnAct(3, width // 2, 3, 2), ConvBnAct(width // 2, width, 3, 2), Split(width))
        self.down = nn.Sequential(ConvBnAct(width, width, 3, 2), Split(width))
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.spp = ConvBnAct(2 * width, width, 1)
        self.merge = nn.Sequential(ConvBnAct(2 * width, width, 1), Split(width))
        self.box = nn.ModuleList(nn.Sequential(ConvBnAct(width, width), nn.Conv2d(width, 4 * bins, 1)) for _ in "ab")
        self.cls = nn.ModuleList(nn.Sequential(ConvBnAct(width, width), nn.Conv2d(width, classes, 1)) for _ in "ab")
        for head in self.cls:
            nn.init.normal_(head[1].weight, std=4.0)  # scores far apart, as after training
        anchors = [
            torch.stack(torch.meshgrid(torch.arange(n) + 0.5, torch.arange(n) + 0.5, indexing="xy"), 0).flatten(1)
            for n in (16, 8)
        ]
        self.register_buffer("anchors", torch.cat(anchors, 1)[None])
        self.register_buffer("strides", torch.cat([torch.full((1, 1, 256), 4.0), torch.full((1, 1, 64), 8.0)], 2))
        self.register_buffer("distances", torch.arange(float(bins)).view(1, 1, bins, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        fine = self.stem(image)
        coarse = self.down(fine)
        coarse = self.spp(torch.cat((coarse, self.pool(coarse)), 1))
        fine = self.merge(torch.cat((fine, functional.interpolate(coarse, scale_factor=2.0)), 1))
        levels = (fine, coarse)
        box = torch.cat([head(x).flatten(2) for head, x in zip(self.box, levels, strict=True)], 2)
        scores = torch.cat([head(x).flatten(2) for head, x in zip(self.cls, levels, strict=True)], 2).sigmoid()
        distance = (box.view(1, 4, self.bins, -1).softmax(2) * self.distances).sum(2)
        left_top, right_bottom = distance.chunk(2, 1)
        boxes = torch.cat((self.anchors - left_top, self.anchors + right_bottom), 1) * self.strides
        if not self.nms:
            return (torch.cat((boxes, scores), 1),)
        boxes = boxes.transpose(1, 2)
        kept = NonMaxSuppression.apply(boxes, scores, torch.tensor([20]), torch.tensor([0.6]), torch.tensor([0.25]))
        batch, of, index = kept.unbind(1)
        return boxes[batch, index], scores[batch, of, index], of


class RetinaNet(nn.Module):
    """Residual backbone, feature pyramid, heads shared by the levels; raw outputs."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.stages = nn.ModuleList((BasicBlock(16, 32), BasicBlock(32, 48, 2), BasicBlock(48, 64, 2)))
        self.lateral = nn.ModuleList(nn.Conv2d(n, width, 1) for n in (32, 48, 64))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.extra = nn.Conv2d(width, width, 3, 2, 1)
        self.scores = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 9, 3, padding=1))
        self.boxes = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 12, 3, padding=1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(image)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        levels = [lateral(x) for lateral, x in zip(self.lateral, found, strict=True)]
        for k in (1, 0):
            levels[k] = levels[k] + functional.interpolate(levels[k + 1], size=levels[k].shape[-2:], mode="nearest")
        levels = [smooth(x) for smooth, x in zip(self.smooth, levels, strict=True)]
        levels.append(self.extra(functional.relu(levels[-1])))
        rows = [
            torch.cat([head(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, columns) for x in levels], 1)
            for head, columns in ((self.scores, 3), (self.boxes, 4))
        ]
        return rows[0].sigmoid(), rows[1]


class TwoStage(nn.Module):
    """Proposals from a region network (the best 8 by TopK), RoiAlign, and a head on each region."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            ConvBnAct(3, width, 3, 2, nn.ReLU), BasicBlock(width, width), BasicBlock(width, width, 2)
        )
        self.rpn = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.objectness, self.deltas = nn.Conv2d(width, 1, 1), nn.Conv2d(width, 4, 1)
        self.fc = nn.Sequential(nn.Linear(width * 16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.classes, self.boxes = nn.Linear(64, 5), nn.Linear(64, 20)
        grid = torch.stack(torch.meshgrid(torch.arange(8.0) * 4, torch.arange(8.0) * 4, indexing="xy"), -1).view(-1, 2)
        self.register_buffer("anchors", torch.cat((grid - 6, grid + 6), 1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.backbone(image)
        x = self.rpn(features)
        objectness = self.objectness(x).flatten()
        deltas = self.deltas(x)[0].flatten(1).t()
        size = self.anchors[:, 2:] - self.anchors[:, :2]
        center = (self.anchors[:, 2:] + self.anchors[:, :2]) * 0.5 + deltas[:, :2] * size
        size = size * deltas[:, 2:].clamp(max=4.135).exp() * 0.5
        boxes = torch.cat((center - size, center + size), 1).clamp(0, 32)
        rois = boxes[objectness.topk(8).indices]
        pooled = RoiAlign.apply(features, rois, torch.zeros(8, dtype=torch.int64), 4, 0.25)
        x = self.fc(pooled.flatten(1))
        return self.classes(x).softmax(-1), self.boxes(x), rois


class Detr(nn.Module):
    """Residual backbone, one encoder and one decoder layer after the norm, learned queries, sine positions."""

    def __init__(self, width: int = 32, queries: int = 6) -> None:
        super().__init__()
        self.backbone = nn.Sequential(ConvBnAct(3, 16, 3, 2, nn.ReLU), BasicBlock(16, 32, 2), BasicBlock(32, 64, 2))
        self.project = nn.Conv2d(64, width, 1)
        self.encoder = Attention(width, 4)
        self.self, self.cross = Attention(width, 4), Attention(width, 4)
        self.mlp = nn.ModuleList(Mlp(width, 64, nn.ReLU()) for _ in "ab")
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.classes = nn.Linear(width, 5)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
        steps = torch.arange(16.0)[:, None] * torch.exp(torch.arange(width) * -0.2)
        self.register_buffer("position", steps.sin()[None])

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.project(self.backbone(image)).flatten(2).transpose(1, 2)
        x = self.norm[0](x + self.encoder(x + self.position))
        memory = self.norm[1](x + self.mlp[0](x))
        q = self.queries.expand(x.shape[0], -1, -1)
        q = self.norm[2](q + self.self(q))
        q = self.norm[3](q + self.cross(q, memory + self.position))
        q = self.norm[5](self.norm[4](q + self.mlp[1](q)))
        return self.classes(q), self.boxes(q).sigmoid()


class Siamese(nn.Module):
    """A tracker: the template's features are the kernel that the search image is correlated with, depthwise."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            ConvBnAct(3, 16, 3, 2, nn.ReLU), BasicBlock(16, width), BasicBlock(width, width, 2)
        )
        self.kernel, self.search = ConvBnAct(width, width, 3, 1, nn.ReLU), ConvBnAct(width, width, 3, 1, nn.ReLU)
        self.scores, self.boxes = nn.Conv2d(width, 1, 1), nn.Conv2d(width, 4, 1)

    def forward(self, template: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        kernel = self.kernel(self.backbone(template))
        x = self.search(self.backbone(image))
        kernel = kernel.transpose(0, 1)
        x = functional.conv2d(x, kernel, groups=kernel.shape[0])
        return self.scores(x).sigmoid(), self.boxes(x).exp()
