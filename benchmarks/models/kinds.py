"""Export networks of five kinds as transformers defines them, with drawn weights and images or sounds.

    python -m benchmarks.models.kinds --batch 1 --out W/kinds     # W/whisper.onnx, W/whisper.npz and so on

``whisper``: the encoder of Whisper base (30 s of sound); ``depth``: Depth Anything small, DINOv2-S, 266 x 266; ``segformer``:
SegFormer-B1, 512 x 512; ``rtdetr``: RT-DETR of ResNet-18, 640 x 640; ``convnext``: ConvNeXt-V2 nano, 224 x 224. Norms scale unevenly, as trained ones do. Needs
transformers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import transformers as hf
from torch import nn

from benchmarks.models.exporting import draw_uneven_weights, export, parse
from benchmarks.models.vit_s import natural_noise


class Outputs(nn.Module):
    """The network with some fields of its result as its outputs."""

    def __init__(self, network: nn.Module, fields: list[str]) -> None:
        super().__init__()
        self.network, self.fields = network, fields

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.network(values)
        return tuple(result[field] for field in self.fields)


def depth() -> nn.Module:
    backbone = hf.Dinov2Config(hidden_size=384, num_attention_heads=6, out_indices=[3, 6, 9, 12], image_size=266,
                               reshape_hidden_states=False, apply_layernorm=True)  # fmt: skip
    sizes = {"neck_hidden_sizes": [48, 96, 192, 384], "fusion_hidden_size": 64, "reassemble_hidden_size": 384}
    return hf.DepthAnythingForDepthEstimation(hf.DepthAnythingConfig(backbone_config=backbone, **sizes))


def segformer() -> nn.Module:
    return hf.SegformerForSemanticSegmentation(
        hf.SegformerConfig(hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=256, num_labels=19)
    )


def rtdetr() -> nn.Module:
    backbone = hf.RTDetrResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic",
                                     embedding_size=64, out_features=["stage2", "stage3", "stage4"])  # fmt: skip
    return hf.RTDetrForObjectDetection(
        hf.RTDetrConfig(backbone_config=backbone, encoder_in_channels=[128, 256, 512], decoder_layers=3)
    )


def whisper() -> nn.Module:
    return hf.WhisperModel(hf.WhisperConfig(d_model=512, encoder_layers=6, encoder_attention_heads=8,
                                            encoder_ffn_dim=2048, decoder_layers=1,
                                            decoder_attention_heads=8)).encoder  # fmt: skip


def convnext() -> nn.Module:
    config = hf.ConvNextV2Config(depths=[2, 2, 8, 2], hidden_sizes=[80, 160, 320, 640], num_labels=1000)
    return hf.ConvNextV2ForImageClassification(config)


KINDS: dict[str, tuple[Callable[[], nn.Module], list[str], int]] = {
    "whisper": (whisper, ["last_hidden_state"], 0),
    "depth": (depth, ["predicted_depth"], 266),
    "segformer": (segformer, ["logits"], 512),
    "rtdetr": (rtdetr, ["logits", "pred_boxes"], 640),
    "convnext": (convnext, ["logits"], 224),
}


def main() -> None:
    options = parse(__doc__, "kinds")
    count = options.batch * options.samples
    for name, (make, fields, side) in KINDS.items():
        torch.manual_seed(options.seed)
        model = make()
        draw_uneven_weights(model, options.seed, lambda weight: nn.init.trunc_normal_(weight, std=0.04))
        sound = np.random.default_rng(options.seed).standard_normal((count, 80, 3000)).astype(np.float32)
        values = natural_noise(count, options.seed + 1, (side, side)) if side else sound / 2
        options.out = options.out.with_name(name)
        export(Outputs(model.eval(), fields), options, {"values": values}, fields)


if __name__ == "__main__":
    main()
