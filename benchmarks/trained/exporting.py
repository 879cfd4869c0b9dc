"""ONNX files of the networks that ship as PyTorch weights; needs torch and onnx, and runs in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
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


class Beats(nn.Module):
    """BeatNet's network (Heydari et al., BeatNet, ISMIR 2021): beats and downbeats, without the class of neither."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, 2, 10)
        self.linear0 = nn.Linear(262, 150)
        self.lstm = nn.LSTM(150, 150, 2, batch_first=True)
        self.linear = nn.Linear(150, 3)

    def forward(self, bands: torch.Tensor) -> torch.Tensor:
        local = nn.functional.max_pool1d(torch.relu(self.conv1(bands[:, None])), 2)
        states, _ = self.lstm(self.linear0(local.flatten(1))[None])
        return torch.softmax(self.linear(states), -1)[..., :2]


class FacePoints(nn.Sequential):
    """The last network of facenet-pytorch's MTCNN (Zhang et al., SPL 23, 2016): five points, the box, face or not."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, width, kernel, pool in ((3, 32, 3, 3), (32, 64, 3, 3), (64, 64, 3, 2), (64, 128, 2, 0)):
            layers += [nn.Conv2d(before, width, kernel), nn.PReLU(width)]
            layers += [nn.MaxPool2d(pool, 2, ceil_mode=True)] if pool else []
        super().__init__(*layers, nn.Linear(1152, 256), nn.PReLU(256), *(nn.Linear(256, n) for n in (2, 4, 10)))

    def forward(self, faces: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dense, activation, face, box, points = list(self)[-5:]
        x = nn.Sequential(*list(self)[:-5])(faces)
        x = activation(dense(x.permute(0, 3, 2, 1).flatten(1)))
        return points(x), box(x), torch.softmax(face(x), 1)


class Pronunciation(nn.Module):
    """g2p-en's sequence to sequence: letters to 20 phonemes, each the most likely one after those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.encoder = nn.Embedding(29, 256), nn.GRU(256, 256, batch_first=True)
        self.phonemes, self.decoder = nn.Embedding(74, 256), nn.GRUCell(256, 256)
        self.classes = nn.Linear(256, 74)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.letters(words))[1][0]
        steps, last = [], torch.full_like(words[:, 0], 2)
        for _ in range(20):
            hidden = self.decoder(self.phonemes(last), hidden)
            steps.append(self.classes(hidden))
            last = steps[-1].argmax(1)
        return torch.stack(steps, 1)


class Forecast(nn.Module):
    """fracast's network, of the package's own code: 48 steps in nine quantiles after 2,048 steps between 0 and 1."""

    def load(self, package: Path) -> None:
        sys.path.insert(0, str(package.parent))
        from fracast.inference import load_fracast

        self.core, self.head = load_fracast(package / "weights")

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        rows, given = series[:, None], torch.ones_like(series, dtype=torch.bool)
        states = self.core(rows, given[:, None], torch.ones_like(rows))
        return self.head.forward_horizon(states, last_obs=series[:, -1:], ctx=series, ctx_mask=given)


class Words(nn.Module):
    """nano-ocr's network (after Shi et al., CRNN, TPAMI 39, 2017)."""

    def __init__(self) -> None:
        super().__init__()

        def layer(before: int, width: int, *norm: nn.Module, kernel: int = 3) -> tuple[nn.Module, ...]:
            return nn.Conv2d(before, width, kernel, padding=kernel // 3), *norm, nn.ReLU()

        wide, norms = nn.MaxPool2d(2, (2, 1), (0, 1)), [nn.BatchNorm2d(width) for width in (256, 512, 512)]
        self.cnn = nn.Sequential(
            *layer(1, 64), nn.MaxPool2d(2), *layer(64, 128), nn.MaxPool2d(2), *layer(128, 256, norms[0]),
            *layer(256, 256), wide, *layer(256, 512, norms[1]), wide, *layer(512, 512, norms[2], kernel=2),
        )  # fmt: skip
        self.rnn = nn.LSTM(512, 256, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(512, 66)

    def forward(self, lines: torch.Tensor) -> torch.Tensor:
        states, _ = self.rnn(self.cnn(lines).squeeze(2).permute(0, 2, 1))
        return self.fc(states)


NETWORKS = {
    "full": (Pitch("full"), torch.randn(4, 1024), "frames"),
    "tiny": (Pitch("tiny"), torch.randn(4, 1024), "frames"),
    "speaker": (Speaker(), torch.rand(1, 160, 40), "mels"),
    "words": (Words(), torch.randn(1, 1, 32, 128), "line"),
    "face-points": (FacePoints(), torch.randn(8, 3, 48, 48), "faces"),
    "forecast": (Forecast(), torch.rand(1, 2048), "series"),
    "pronunciation": (Pronunciation(), torch.full((8, 10), 2), "words"),
    "beats": (Beats(), torch.rand(500, 272), "bands"),
}
"""Name of a recipe's model -> the network, an input, and the input's name."""


def main(name: str, weights: Path, out: Path) -> None:
    model, example, feeds = NETWORKS[name]
    how: dict[str, Any] = {"dynamo": False, "opset_version": 17}
    if name == "forecast":  # only the other exporter knows its DFT
        model.load(weights)
        how = {"dynamo": True, "external_data": False, "opset_version": 18}
    elif name == "speaker":
        model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=False)["model_state"], strict=False)
    else:  # in the order of the layers, whatever the package calls them
        is_numpy = name == "pronunciation"
        given = np.load(weights) if is_numpy else torch.load(weights, map_location="cpu", weights_only=True)
        values = map(torch.as_tensor, given.values())
        model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))
    torch.onnx.export(model.eval(), (example,), str(out), input_names=[feeds], output_names=["result"], **how)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
