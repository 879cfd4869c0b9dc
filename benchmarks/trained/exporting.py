"""ONNX files of the networks that ship as PyTorch weights; needs torch and onnx, and runs in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

WIDTHS = {"full": (1024, 128, 128, 128, 256, 512), "tiny": (128, 16, 16, 16, 32, 64)}


class Pitch(nn.Module):
    """torchcrepe's network (Kim et al., CREPE, ICASSP 2018), with its names of parameters."""

    def __init__(self, size: str) -> None:
        super().__init__()
        widths = WIDTHS[size]
        for k, (before, width) in enumerate(zip((1, *widths), widths, strict=False), start=1):
            kernel, stride = (512, 4) if k == 1 else (64, 1)
            setattr(self, f"conv{k}", nn.Conv2d(before, width, (kernel, 1), (stride, 1)))
            setattr(self, f"conv{k}_BN", nn.BatchNorm2d(width, eps=0.0010000000474974513, momentum=0.0))
        self.classifier = nn.Linear(4 * widths[-1], 360)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        x = frames[:, None, :, None]
        for k in range(1, 7):
            x = nn.functional.pad(x, (0, 0, 254, 254) if k == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{k}_BN")(torch.relu(getattr(self, f"conv{k}")(x)))
            x = nn.functional.max_pool2d(x, (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).flatten(1)))


class Speaker(nn.Module):
    """Resemblyzer's network (Wan et al., Generalized End-to-End Loss, ICASSP 2018), with its names of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(mels)
        raw = torch.relu(self.linear(hidden[-1]))
        return raw / torch.norm(raw, dim=1, keepdim=True)


def main(name: str, weights: Path, out: Path) -> None:
    given = torch.load(weights, map_location="cpu", weights_only=name != "speaker")
    if name == "speaker":
        model, example, feeds, given = Speaker(), torch.rand(1, 160, 40), "mels", given["model_state"]
    else:
        model, example, feeds = Pitch(name), torch.randn(4, 1024), "frames"
    model.load_state_dict(given, strict=name != "speaker")
    torch.onnx.export(
        model.eval(), (example,), str(out), opset_version=17, input_names=[feeds], output_names=["result"], dynamo=False
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
