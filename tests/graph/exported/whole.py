"""Exports whole networks with torch's two exporters, without weights, into ``networks/``.

Needs torch and onnxscript: ``pip install '.[bench]'``, then ``python -m tests.graph.exported.whole [NAME ...]``.
``derived.py`` makes the quantised and the optimised ones from these, with ONNX Runtime.
"""

from __future__ import annotations

import sys
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from tests.graph.exported.networks import detectors, sequences, vision
from tests.graph.exported.stripped import strip

FOLDER = Path(__file__).parent / "networks"


@dataclass(frozen=True)
class Case:
    """One network.

    Attributes:
        make: builds it.
        inputs: input name -> example.
        outputs: names.
        torchscript: opset; None where that exporter cannot.
        dynamo: opset; None where that exporter cannot.
        dynamic: input or output name -> axis -> name of the dimension.
        keep: names of constants that must keep their values.
    """

    make: Callable[[], nn.Module]
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    torchscript: int | None
    dynamo: int | None
    dynamic: dict[str, dict[int, str]] | None = None
    keep: tuple[str, ...] = ()


def image(*shape: int) -> dict[str, Tensor]:
    return {"image": torch.randn(*(shape or (1, 3, 32, 32)))}


def batch(*names: str) -> dict[str, dict[int, str]]:
    return {name: {0: "batch"} for name in names}


def cases() -> dict[str, Case]:
    tokens = torch.randint(0, 60, (1, 16))
    past = torch.randn(2, 1, 2, 3, 8)
    present = ("present_0", "present_1")
    cache = {name: {1: "batch", 3: "before"} for name in ("past_0", "past_1")}
    return {
        "yolo_nms": Case(lambda: detectors.Yolo(True), image(1, 3, 64, 64), ("boxes", "scores", "classes"), 11, None),
        "yolo": Case(lambda: detectors.Yolo(False), image(1, 3, 64, 64), ("detections",), 12, 18),
        "retinanet": Case(
            detectors.RetinaNet, image(1, 3, 64, 64), ("scores", "boxes"), 13, 20, batch("image", "scores", "boxes")
        ),
        "two_stage": Case(detectors.TwoStage, image(), ("classes", "boxes", "rois"), 16, None),
        "detr": Case(detectors.Detr, image(), ("classes", "boxes"), 17, 18),
        "siamese": Case(
            detectors.Siamese, {"template": torch.randn(1, 3, 16, 16), **image()}, ("scores", "boxes"), 13, 18
        ),
        "swin": Case(vision.Swin, image(), ("logits",), 14, 20),
        "convnext": Case(vision.ConvNext, image(), ("logits",), 16, 23, batch("image", "logits")),
        "diffusion_unet": Case(
            vision.DiffusionUnet,
            {"latent": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([500]), "text": torch.randn(1, 5, 24)},
            ("noise",), 15, 21, batch("latent", "timestep", "text", "noise"),
        ),
        "pointnet": Case(vision.PointNet, {"cloud": torch.randn(1, 32, 3)}, ("scores",), 17, 18),
        "shape_arithmetic": Case(
            vision.ShapeArithmetic, image(), ("classes",), 12, None, {"image": {2: "height", 3: "width"}}
        ),
        "channels_last": Case(vision.ChannelsLast, image(1, 32, 32, 3), ("scores",), 9, 18),
        "llama": Case(
            sequences.Llama, {"tokens": tokens[:, :4], "past_0": past, "past_1": past + 1}, ("logits", *present),
            14, 20, {"tokens": {0: "batch", 1: "length"}, **cache},
        ),
        "whisper": Case(sequences.Whisper, {"mel": torch.randn(1, 20, 48)}, ("states",), 17, 23),
        "lstm": Case(sequences.Lstm, {"signal": torch.randn(1, 12, 12)}, ("scores",), 9, 18),
        "gru": Case(sequences.Gru, {"signal": torch.randn(1, 12, 12)}, ("scores",), 14, 20),
        "text_encoder": Case(
            sequences.TextEncoder, {"tokens": tokens, "attention_mask": torch.ones_like(tokens)}, ("states", "pooled"),
            13, 18, batch("tokens", "attention_mask", "states", "pooled"),
        ),
    }  # fmt: skip


def network(name: str, case: Case) -> nn.Module:
    """Built by a seed, in inference mode, with batch norms that have seen something."""
    torch.manual_seed(zlib.crc32(name.encode()))
    module = case.make()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_(0, 0.2)
            part.running_var.uniform_(0.5, 1.5)
            part.weight.data.uniform_(0.7, 1.3)
    return module.eval()


def export(name: str, case: Case, dynamo: bool) -> onnx.ModelProto:
    module, names = network(name, case), [*case.inputs]
    arguments = {"input_names": names, "output_names": [*case.outputs], "dynamo": dynamo}
    example = tuple(case.inputs.values())
    if not dynamo:
        file = BytesIO()
        torch.onnx.export(module, example, file, opset_version=case.torchscript, dynamic_axes=case.dynamic, **arguments)
        return onnx.load_model_from_string(file.getvalue())
    shapes = None
    if case.dynamic:
        axes = [case.dynamic.get(n, {}) for n in names]
        example = tuple(
            torch.cat((e, e), next(k for k, d in a.items() if d == "batch")) if "batch" in a.values() else e
            for e, a in zip(example, axes, strict=True)
        )
        shapes = tuple(axes)
    program = torch.onnx.export(
        module, example, opset_version=case.dynamo, dynamic_shapes=shapes, verbose=False, **arguments
    )
    return program.model_proto


def main(wanted: list[str]) -> None:
    warnings.simplefilter("ignore")
    failed: dict[str, str] = {}
    for name, case in cases().items():
        for dynamo, opset in ((False, case.torchscript), (True, case.dynamo)):
            stem = f"{name}_{'dynamo' if dynamo else 'torchscript'}_{opset}"
            if opset is None or (wanted and name not in wanted and stem not in wanted):
                continue
            try:
                model = export(name, case, dynamo)
            except Exception as error:
                failed[stem] = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            onnx.save(strip(model, case.keep), FOLDER / f"{stem}.onnx")
    if failed:
        raise SystemExit("\n".join(f"{stem}: {text}" for stem, text in failed.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
