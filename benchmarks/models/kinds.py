"""Export networks of five kinds as transformers defines them, with drawn weights, and images or sounds.

``whisper``: the encoder of Whisper base, 30 s of sound; ``depth``: Depth Anything small, 266 x 266; ``segformer``:
SegFormer-B1, 512 x 512; ``rtdetr``: RT-DETR of ResNet-18, 640 x 640; ``convnext``: ConvNeXt-V2 nano, 224 x 224. Norms
scale unevenly, as trained ones do. Needs transformers.

    python -m benchmarks.models.kinds --batch 1 --out W/kinds     # W/whisper.onnx, W/whisper.npz and so on
"""

from __future__ import annotations

import numpy as np
import torch
import transformers as hf
from torch import nn

from benchmarks.models.exporting import draw_uneven_weights, export, parse
from benchmarks.models.vit_s import natural_noise

_WHISPER = {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048}
_DINO = {"hidden_size": 384, "num_attention_heads": 6, "image_size": 266, "out_indices": [3, 6, 9, 12],
         "reshape_hidden_states": False, "apply_layernorm": True}  # fmt: skip
_DEPTH = {"neck_hidden_sizes": [48, 96, 192, 384], "fusion_hidden_size": 64, "reassemble_hidden_size": 384}
_SEGFORMER = {"hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 256, "num_labels": 19}
_RESNET = {"depths": [2] * 4, "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic", "embedding_size": 64,
           "out_features": ["stage2", "stage3", "stage4"]}  # fmt: skip
_CONVNEXT = {"depths": [2, 2, 8, 2], "hidden_sizes": [80, 160, 320, 640], "num_labels": 1000}


def networks() -> dict[str, tuple[nn.Module, list[str], int]]:
    """Name -> network, fields of its result that are outputs, side of its images; 0 for sounds."""
    whisper = hf.WhisperConfig(decoder_layers=1, decoder_attention_heads=8, **_WHISPER)
    depth = hf.DepthAnythingConfig(backbone_config=hf.Dinov2Config(**_DINO), **_DEPTH)
    rtdetr = hf.RTDetrConfig(
        backbone_config=hf.RTDetrResNetConfig(**_RESNET), encoder_in_channels=[128, 256, 512], decoder_layers=3
    )
    return {
        "whisper": (hf.WhisperModel(whisper).encoder, ["last_hidden_state"], 0),
        "depth": (hf.DepthAnythingForDepthEstimation(depth), ["predicted_depth"], 266),
        "segformer": (hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**_SEGFORMER)), ["logits"], 512),
        "rtdetr": (hf.RTDetrForObjectDetection(rtdetr), ["logits", "pred_boxes"], 640),
        "convnext": (hf.ConvNextV2ForImageClassification(hf.ConvNextV2Config(**_CONVNEXT)), ["logits"], 224),
    }


class Outputs(nn.Module):
    """A network with some fields of its result as its outputs."""

    def __init__(self, network: nn.Module, fields: list[str]) -> None:
        super().__init__()
        self.network, self.fields = network, fields

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.network(values)
        return tuple(result[field] for field in self.fields)


def main() -> None:
    options = parse(__doc__, "kinds")
    count = options.batch * options.samples
    for name, (network, fields, side) in networks().items():
        draw_uneven_weights(network, options.seed, lambda weight: nn.init.trunc_normal_(weight, std=0.04))
        sound = np.random.default_rng(options.seed).standard_normal((count, 80, 3000)).astype(np.float32) / 2
        values = natural_noise(count, options.seed + 1, (side, side)) if side else sound
        options.out = options.out.with_name(name)
        export(Outputs(network.eval(), fields), options, {"values": values}, fields)


if __name__ == "__main__":
    main()
