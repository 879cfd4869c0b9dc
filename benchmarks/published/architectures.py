"""The networks of ``tensorrt.csv``, exported without trained weights: latencies depend on the architecture alone.

Architectures come out of torchvision, timm and ultralytics (the extra ``published``); PSPNet and YOLOX, which none of
them has, are written here after their papers (arXiv 1612.01105, 2107.08430). Weights are random, files are not kept in
the repository.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

OPSET = 17

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def _import_without_operators() -> None:
    """Import torchvision beside a CPU build of torch, for which its operators do not load: two schemas are missing."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _LIBRARY.define(name + _SCHEMA)
    import torchvision  # noqa: F401


def _timm(name: str, **options: object) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, exportable=True, **options)


class _First(nn.Module):
    """The first output of a module that returns several, or a dictionary."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(x)
        return next(iter(outputs.values())) if isinstance(outputs, dict) else outputs[0]


def _ultralytics(name: str) -> nn.Module:
    """A detector as ultralytics exports it: normalisations folded, boxes decoded."""
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel(f"{name}.yaml", verbose=False).eval().fuse(verbose=False)
    head = model.model[-1]
    head.export, head.format = True, "onnx"
    return model


_CITYSCAPES_CLASSES = 19


def _segmenter(name: str) -> nn.Module:
    from torchvision.models import segmentation

    make = getattr(segmentation, name)
    return _First(make(weights=None, weights_backbone=None, num_classes=_CITYSCAPES_CLASSES, aux_loss=False))


class _PspNet(nn.Module):
    """ResNet-50 of output stride 8, pooled to 1, 2, 3 and 6 bins; 512 channels in the head."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet50

        whole = resnet50(weights=None, replace_stride_with_dilation=[False, True, True])
        self.backbone = nn.Sequential(*list(whole.children())[:-2])
        self.pooled = nn.ModuleList([_conv_norm(2048, 512, 1) for _ in range(4)])
        self.head = nn.Sequential(_conv_norm(4096, 512, 3), nn.Conv2d(512, _CITYSCAPES_CLASSES, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the input's size."""
        features = self.backbone(x)
        height, width = int(features.shape[2]), int(features.shape[3])
        parts = [features]
        for bins, convolution in zip((1, 2, 3, 6), self.pooled, strict=True):
            # Windows that cover the size, as adaptive pooling exports only where the bins divide it.
            stride = (-(-height // bins), -(-width // bins))
            pooled = convolution(nn.functional.avg_pool2d(features, stride, stride, ceil_mode=True))
            parts.append(nn.functional.interpolate(pooled, (height, width), mode="bilinear"))
        return nn.functional.interpolate(self.head(torch.cat(parts, 1)), x.shape[2:], mode="bilinear")


def _conv_norm(inner: int, outer: int, kernel: int, stride: int = 1, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    convolution = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outer), act())


class _RetinaNet(nn.Module):
    """Backbone, pyramid and heads of torchvision's RetinaNet: logits and box offsets of five levels."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.detection import retinanet_resnet50_fpn

        whole = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=80)
        self.backbone, self.head = whole.backbone, whole.head

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all anchors."""
        outputs = self.head(list(self.backbone(x).values()))
        return outputs["cls_logits"].sigmoid(), outputs["bbox_regression"]


def _silu(inner: int, outer: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return _conv_norm(inner, outer, kernel, stride, nn.SiLU)


class _Csp(nn.Module):
    """Cross-stage partial layer: half of the channels through ``count`` bottlenecks."""

    def __init__(self, inner: int, outer: int, count: int, shortcut: bool = True) -> None:
        super().__init__()
        half = outer // 2
        self.one, self.two, self.three = _silu(inner, half, 1), _silu(inner, half, 1), _silu(2 * half, outer, 1)
        self.blocks = nn.ModuleList(nn.Sequential(_silu(half, half, 1), _silu(half, half, 3)) for _ in range(count))
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same size, ``outer`` channels."""
        y = self.one(x)
        for block in self.blocks:
            y = y + block(y) if self.shortcut else block(y)
        return self.three(torch.cat([y, self.two(x)], 1))


class _Pyramid(nn.Module):
    """Spatial pyramid pooling of kernels 5, 9 and 13."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = _silu(channels, channels // 2, 1), _silu(2 * channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        return self.two(torch.cat([x, *(nn.functional.max_pool2d(x, k, 1, k // 2) for k in (5, 9, 13))], 1))


class _Yolox(nn.Module):
    """YOLOX: focus, CSP-Darknet, path aggregation, decoupled heads; boxes, objectness and 80 classes, not decoded."""

    def __init__(self, depth: float, width: float) -> None:
        super().__init__()
        base, three = int(64 * width), max(1, round(3 * depth))
        a, b, c, d = (base * factor for factor in (2, 4, 8, 16))
        self.stem = _silu(12, base, 3)
        self.dark2 = nn.Sequential(_silu(base, a, 3, 2), _Csp(a, a, three))
        self.dark3 = nn.Sequential(_silu(a, b, 3, 2), _Csp(b, b, 3 * three))
        self.dark4 = nn.Sequential(_silu(b, c, 3, 2), _Csp(c, c, 3 * three))
        self.dark5 = nn.Sequential(_silu(c, d, 3, 2), _Pyramid(d), _Csp(d, d, three, shortcut=False))
        self.reduce5, self.reduce4 = _silu(d, c, 1), _silu(c, b, 1)
        self.up4, self.up3 = _Csp(2 * c, c, three, shortcut=False), _Csp(2 * b, b, three, shortcut=False)
        self.down3, self.down4 = _silu(b, b, 3, 2), _silu(c, c, 3, 2)
        self.out4, self.out5 = _Csp(2 * b, c, three, shortcut=False), _Csp(2 * c, d, three, shortcut=False)
        head = int(256 * width)

        def branch() -> nn.Module:
            return nn.Sequential(_silu(head, head, 3), _silu(head, head, 3))

        self.stems = nn.ModuleList(_silu(channels, head, 1) for channels in (b, c, d))
        self.classes, self.boxes = (nn.ModuleList(branch() for _ in range(3)) for _ in range(2))
        self.to_class, self.to_box, self.to_object = (
            nn.ModuleList(nn.Conv2d(head, count, 1) for _ in range(3)) for count in (80, 4, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch, anchors, 85."""
        corners = [x[..., i::2, j::2] for j in (0, 1) for i in (0, 1)]
        p3 = self.dark3(self.dark2(self.stem(torch.cat(corners, 1))))
        p4 = self.dark4(p3)
        top = self.reduce5(self.dark5(p4))
        middle = self.reduce4(self.up4(torch.cat([nn.functional.interpolate(top, scale_factor=2), p4], 1)))
        n3 = self.up3(torch.cat([nn.functional.interpolate(middle, scale_factor=2), p3], 1))
        n4 = self.out4(torch.cat([self.down3(n3), middle], 1))
        n5 = self.out5(torch.cat([self.down4(n4), top], 1))
        levels = []
        for k, features in enumerate((n3, n4, n5)):
            stem = self.stems[k](features)
            box = self.boxes[k](stem)
            parts = [
                self.to_box[k](box),
                self.to_object[k](box).sigmoid(),
                self.to_class[k](self.classes[k](stem)).sigmoid(),
            ]
            levels.append(torch.cat(parts, 1).flatten(2))
        return torch.cat(levels, 2).transpose(1, 2)


_TORCHVISION = {"resnext50": "resnext50_32x4d", "shufflenetv2": "shufflenet_v2_x1_0", "mobilenetv2": "mobilenet_v2"}
_TORCHVISION |= {name: name for name in ("resnet18", "resnet34", "resnet50")}
_TIMM = {"mobilenetv1": "mobilenetv1_100", "vitb32_224": "vit_base_patch32_224"}
_TIMM |= {"swinb384": "swin_base_patch4_window12_384"}
_MAKERS: dict[str, Callable[[], nn.Module]] = {
    "clipvit_b32_768": lambda: _timm("vit_base_patch32_224", img_size=768),
    "clipvit_b16_768": lambda: _timm("vit_base_patch16_224", img_size=768),
    "fcn_r50d8": lambda: _segmenter("fcn_resnet50"),
    "deeplabv3_r50d8": lambda: _segmenter("deeplabv3_resnet50"),
    "pspnet_r50d8": _PspNet,
    "retinanet_r50": _RetinaNet,
    "yolox_s": lambda: _Yolox(0.33, 0.50),
    "yolox_m": lambda: _Yolox(0.67, 0.75),
    "yolox_l": lambda: _Yolox(1.0, 1.0),
}


def _make(architecture: str) -> nn.Module:
    if architecture in _MAKERS:
        return _MAKERS[architecture]()
    if architecture in _TORCHVISION:
        from torchvision.models import get_model

        return get_model(_TORCHVISION[architecture], weights=None)
    return (
        _ultralytics(architecture) if architecture.startswith("yolo") else _timm(_TIMM.get(architecture, architecture))
    )


def export(name: str, size: tuple[int, int], batch: int, path: Path) -> None:
    """Write a network as ONNX.

    Args:
        name: of the column ``onnx``; a suffix ``_bN`` repeats the batch and is not part of the architecture.
        size: height and width of the image.
        batch: static.
        path: the file.
    """
    _import_without_operators()
    torch.manual_seed(0)
    model = _make(name.removesuffix(f"_b{batch}")).eval()
    with torch.no_grad():
        torch.onnx.export(
            model, (torch.zeros(batch, 3, *size),), str(path), opset_version=OPSET, input_names=["x"], dynamo=False
        )
