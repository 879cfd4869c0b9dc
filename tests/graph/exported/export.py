"""Export a small CNN and a small transformer with torch's two exporters: the models beside this file.

Needs torch and onnxscript: ``pip install '.[bench]'``, then ``python tests/graph/exported/export.py``.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import torch

HERE = Path(__file__).parent


class Cnn(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.SiLU()
        )
        self.depthwise = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = torch.nn.GroupNorm(2, 8)
        self.squeeze = torch.nn.Sequential(
            torch.nn.Conv2d(8, 4, 1), torch.nn.ReLU(), torch.nn.Conv2d(4, 8, 1), torch.nn.Hardsigmoid()
        )
        self.up = torch.nn.Upsample(scale_factor=2, mode="bilinear")
        self.transposed = torch.nn.ConvTranspose2d(8, 8, 2, 2)
        self.pool = torch.nn.MaxPool2d(2)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(image)
        x = x + self.norm(self.depthwise(x))
        x = x * self.squeeze(x.mean((2, 3), keepdim=True))
        x = torch.cat([self.up(x), self.transposed(x)], 1)
        features = self.pool(torch.nn.functional.leaky_relu(x))
        return torch.log_softmax(self.head(features.mean((2, 3))), 1), features


class Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(16), enable_nested_tensor=False)
        self.cross = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = torch.nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        causal = torch.triu(torch.full((length, length), float("-inf")), 1)
        position = torch.sin(torch.arange(length).unsqueeze(1) * torch.exp(torch.arange(16) * -0.5))
        x = self.encoder(self.embed(tokens) + position, mask=causal, is_causal=False)
        x = x + self.cross(x, memory, memory, need_weights=False)[0]
        return self.head(x.float().clamp(-10, 10))


def main() -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 16, 16)
    tokens, memory = torch.randint(0, 50, (2, 6)), torch.randn(2, 5, 16)
    batch = torch.export.Dim.AUTO
    cases = {
        "cnn": (Cnn(), (image,), ["image"], ["scores", "features"], ({0: batch},)),
        "transformer": (Transformer(), (tokens, memory), ["tokens", "memory"], ["logits"], None),  # static under dynamo
    }
    for name, (module, example, inputs, outputs, dynamic) in cases.items():
        module.eval()
        axes = {n: {0: "batch"} for n in (*inputs, *outputs)}
        for opset in (13 if name == "cnn" else 14, 17, 20):  # torch has no attention product at 13
            torch.onnx.export(
                module, example, str(HERE / f"{name}_torchscript_{opset}.onnx"), opset_version=opset, dynamo=False,
                input_names=inputs, output_names=outputs, dynamic_axes=axes,
            )  # fmt: skip
        for opset in (18, 21):
            torch.onnx.export(
                module, example, str(HERE / f"{name}_dynamo_{opset}.onnx"), opset_version=opset, dynamo=True,
                input_names=inputs, output_names=outputs, dynamic_shapes=dynamic, external_data=False, verbose=False,
            )  # fmt: skip
    for path in HERE.glob("*_dynamo_*.onnx"):
        drop_stack_traces(path)


def drop_stack_traces(path: Path) -> None:
    """torch writes where on this machine each node came from: nothing to commit."""
    model = onnx.load(path)
    for node in model.graph.node:
        kept = [entry for entry in node.metadata_props if "stack_trace" not in entry.key]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    onnx.save(model, path)


if __name__ == "__main__":
    main()
