"""The networks that are compared, and how each is made and measured."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parents[1] / "models"
READY = {
    "digits_vit": (_HERE / "digits_vit.onnx", _HERE / "digits_calib.npz"),
    "line_encoder": (_HERE / "line_encoder.onnx", _HERE / "line_encoder.npz"),
}
"""Models that are in the repository, with their samples."""


@dataclass(frozen=True)
class PeerModel:
    """One network.

    Attributes:
        name: of its script in ``benchmarks/models``.
        what: in a few words.
        batch: rows of its inputs where they are static.
        rows: rows a sample where the batch is dynamic.
        samples: for the search, and as many held out.
        duration_ms: of one timing of the baseline.
        without_kernel: operators that ONNX Runtime's CUDA provider has no FP16 kernel for; converters are told so, too.
    """

    name: str
    what: str
    batch: int = 8
    rows: int = 1
    samples: int = 4
    duration_ms: float = 100.0
    without_kernel: tuple[str, ...] = ()

    def make(self, work: Path) -> tuple[Path, Path]:
        """Model and samples, exported by the model's script where they are not there yet."""
        if self.name in READY:
            return READY[self.name]
        model, data = work / f"{self.name}.onnx", work / f"{self.name}.npz"
        if not data.exists():
            command = [sys.executable, "-m", f"benchmarks.models.{self.name}", "--out", str(work / self.name)]
            command += ["--batch", str(self.batch), "--samples", str(2 * self.samples)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return model, data


MODELS = {
    model.name: model
    for model in (
        PeerModel("vit_s", "ViT-S, batch 8"),
        PeerModel("resnet50", "ResNet-50, batch 8"),
        PeerModel("swin_t", "Swin-T, batch 8"),
        PeerModel("raft", "RAFT-small with GridSample", batch=1, without_kernel=("GridSample",)),
        PeerModel("detector", "detector with FPN and decode", batch=1),
        PeerModel("unet", "U-Net, GroupNorm and cross attention", batch=1),
        PeerModel("decoder", "decoder blocks, RMSNorm and RoPE"),
        PeerModel("line_encoder", "text encoder, trained", rows=8, samples=6),
        PeerModel("digits_vit", "digits model", rows=8, samples=6),
        PeerModel("text_encoder", "text encoder, batch 8"),
        PeerModel("flow_net", "flow matching net, batch 8", samples=32, duration_ms=200.0),
    )
}
