"""Trains a small vision transformer on scikit-learn's handwritten digits and exports it to ONNX.

What makes its layers differ in FP16 is set where the weights start (see `SmallViT`) and then trained like the rest:
nothing is changed after training.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).resolve().parent
OPSET = 18
CLASSES = 10
GRID = 4  # the stem halves the 8x8 image: 4x4 tokens


class BlockStart(NamedTuple):
    """Where one transformer block starts its training."""

    key_bias: float
    """Standard deviation of the bias of the keys. It adds the same to all logits of a query: softmax drops it again."""
    layer_scale: float
    """Gain of both residual branches (LayerScale)."""


BLOCKS = (
    BlockStart(key_bias=20.0, layer_scale=0.5),
    BlockStart(key_bias=240.0, layer_scale=1.0),
    BlockStart(key_bias=0.0, layer_scale=0.01),
    BlockStart(key_bias=60.0, layer_scale=0.3),
)


class Attention(nn.Module):
    """Multi-head self-attention, written out so that it exports as MatMul, Softmax, MatMul."""

    def __init__(self, dim: int, heads: int, tokens: int, key_bias: float) -> None:
        super().__init__()
        self.dim, self.heads, self.tokens, self.head_dim = dim, heads, tokens, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.softmax = nn.Softmax(dim=-1)
        self.proj = nn.Linear(dim, dim)
        nn.init.zeros_(self.qkv.bias)
        nn.init.normal_(self.qkv.bias[dim : 2 * dim], std=key_bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.reshape(-1, self.tokens, self.heads, self.head_dim) for part in self.qkv(x).split(self.dim, dim=-1)
        )
        logits = (q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1)) * (1.0 / math.sqrt(self.head_dim))
        mixed = self.softmax(logits) @ v.permute(0, 2, 1, 3)
        return self.proj(mixed.permute(0, 2, 1, 3).reshape(-1, self.tokens, self.dim))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, tokens: int, start: BlockStart) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, tokens, start.key_bias)
        self.scale1 = nn.Parameter(torch.full((dim,), start.layer_scale))
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 4 * dim)
        self.scale2 = nn.Parameter(torch.full((dim,), start.layer_scale))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1 * self.attn(self.norm1(x))
        return x + self.scale2 * self.mlp(self.norm2(x))


class Stem(nn.Module):
    """Raw intensities (N, 1, 8, 8) to normalised tokens (N, 16, dim)."""

    def __init__(self, dim: int, offset: float) -> None:
        super().__init__()
        self.dim = dim
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(32, dim, 3, stride=2, padding=1)
        nn.init.kaiming_normal_(self.conv2.weight)
        self.norm = nn.LayerNorm(dim)
        # LayerNorm takes a common offset out again: in FP32 it costs nothing, in FP16 the difference has few bits left.
        self.position = nn.Parameter(offset + 2.0 * torch.randn(1, GRID * GRID, dim))

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv2(self.act1(self.bn1(self.conv1(image))))
        return self.norm(x.reshape(-1, self.dim, GRID * GRID).transpose(1, 2) + self.position)


class SmallViT(nn.Module):
    """Vision transformer with a convolutional stem for 8x8 images.

    Three starting values make its layers differ in FP16: a common offset in the position embedding in front of the
    stem's LayerNorm, a bias of the keys and a LayerScale gain, both different from block to block. Training may change
    all three; it has little reason to change the first two, which neither LayerNorm nor softmax lets through in FP32.
    """

    def __init__(self, dim: int = 64, heads: int = 4, offset: float = 600.0) -> None:
        super().__init__()
        self.stem = Stem(dim, offset)
        self.blocks = nn.ModuleList(Block(dim, heads, GRID * GRID, start) for start in BLOCKS)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Image: (N, 1, 8, 8), raw intensities 0 to 16. Returns logits: (N, 10)."""
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class Split(NamedTuple):
    """The digits, split once and for all: three quarters to train, one quarter held out, classes in proportion."""

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]


def load_split() -> Split:
    digits = load_digits()
    images = digits.images.astype(np.float32)[:, None]
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target.astype(np.int64), test_size=0.25, random_state=0, stratify=digits.target
    )
    return Split(train_x, train_y, test_x, test_y)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shifts each image by up to one pixel each way and adds a little noise."""
    padded = functional.pad(images, (1, 1, 1, 1))
    rows, columns = torch.randint(0, 3, (2, len(images), 1, 1), generator=generator)
    line = torch.arange(8)
    shifted = padded[torch.arange(len(images))[:, None, None], 0, rows + line[:, None], columns + line][:, None]
    return (shifted + 0.5 * torch.randn(shifted.shape, generator=generator)).clamp(0, 16)


def train(model: SmallViT, split: Split, epochs: int, seed: int, batch: int = 64, rate: float = 2e-3) -> None:
    generator = torch.Generator().manual_seed(seed)
    images, labels = torch.from_numpy(split.train_images), torch.from_numpy(split.train_labels)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim in (2, 4)], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim not in (2, 4)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    steps = math.ceil(len(images) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * steps, pct_start=0.1)
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(images), generator=generator).split(batch):
            loss = functional.cross_entropy(model(augment(images[rows], generator)), labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(rows)
        if (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1:3d}: training loss {total / len(images):.4f}")
    model.eval()


def accuracy(logits: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    return float((logits.argmax(axis=1) == labels).mean())


def export(model: SmallViT, path: Path) -> None:
    axes, names = (
        {"image": {0: "batch"}, "logits": {0: "batch"}},
        {"input_names": ["image"], "output_names": ["logits"]},
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own insides
        # Deprecated, and still the exporter that names nodes by their scope (/blocks.1/attn/softmax/Softmax).
        how = {"opset_version": OPSET, "dynamo": False, "dynamic_axes": axes, **names}
        torch.onnx.export(model, (torch.zeros(2, 1, 8, 8),), path, **how)
    onnx.checker.check_model(onnx.load(path), full_check=True)


def run_onnx(path: Path, images: NDArray[np.float32]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["logits"], {"image": images})[0], dtype=np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "digits_vit.onnx", help="the model to write")
    parser.add_argument("--calibration", type=Path, default=HERE / "digits_calib.npz", help="the samples to write")
    parser.add_argument("--samples", type=int, default=96, help="calibration samples, from the training split")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(2)  # sums are split by thread: another number gives other last digits
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(True)
    split = load_split()
    print(f"split: {len(split.train_images)} training and {len(split.test_images)} held-out images")
    model = SmallViT()
    started = time.perf_counter()
    train(model, split, options.epochs, options.seed)
    print(f"trained {options.epochs} epochs in {time.perf_counter() - started:.0f} s")
    with torch.no_grad():
        logits = model(torch.from_numpy(split.test_images)).numpy()
    print(f"held-out accuracy, PyTorch: {accuracy(logits, split.test_labels):.2%}")

    export(model, options.out)
    exported = run_onnx(options.out, split.test_images)
    print(f"held-out accuracy, ONNX:    {accuracy(exported, split.test_labels):.2%}")
    print(f"largest difference of a logit, ONNX to PyTorch: {np.abs(exported - logits).max():.2g}")
    np.savez(options.calibration, image=split.train_images[: options.samples])
    print(f"wrote {options.out} ({options.out.stat().st_size / 1e6:.2f} MB) and {options.calibration}")


if __name__ == "__main__":
    main()
