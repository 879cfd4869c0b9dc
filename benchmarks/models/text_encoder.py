"""Export a BERT-like text encoder (Devlin et al., arXiv 1810.04805; width 384, 6 layers, 6 heads) and token batches.

No trained weights travel with mptune, so they are drawn: normal with deviation 0.04, norm gains log-normal, so that
layers differ as trained ones do. Token ids follow Zipf's law, as words do; lengths vary and the rest is padding, which
the mask hides. Latency does not depend on either; errors are this network's, not a trained one's.

    python -m benchmarks.models.text_encoder --out text_encoder --batch 8     # text_encoder.onnx (56 MB), .npz
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from benchmarks.models.exporting import draw_uneven_weights, export, parse

VOCABULARY, LENGTH, WIDTH, DEPTH, HEADS = 8192, 128, 384, 6, 6
MASKED = -1e4
"""Added to the scores of padding, as BERT's own code does."""


class Layer(nn.Module):
    """One block; its sizes are numbers, so that the export has them as constants."""

    def __init__(self, length: int = LENGTH, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.sizes = length, heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length, count, head = self.sizes

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.reshape(-1, length, count, head).transpose(1, 2)

        scores = heads(self.query(x)) @ heads(self.key(x)).transpose(-2, -1) / head**0.5 + mask
        read = (scores.softmax(-1) @ heads(self.value(x))).transpose(1, 2).reshape(-1, length, count * head)
        x = self.norm1(x + self.proj(read))
        return self.norm2(x + self.fc2(self.act(self.fc1(x))))


class TextEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.words(input_ids) + self.positions.weight[None])
        mask = (1.0 - attention_mask[:, None, None, :].float()) * MASKED
        for layer in self.layers:
            x = layer(x, mask)
        return x, self.pooler(x[:, 0]).tanh()


def token_batches(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask: int64 (count, 128) each; padding has id 0."""
    rng = np.random.default_rng(seed)
    share = 1.0 / np.arange(1, VOCABULARY)
    ids = rng.choice(np.arange(1, VOCABULARY), size=(count, LENGTH), p=share / share.sum())
    mask = np.arange(LENGTH) < rng.integers(16, LENGTH + 1, size=(count, 1))
    return np.where(mask, ids, 0).astype(np.int64), mask.astype(np.int64)


def main() -> None:
    options = parse(__doc__, "text_encoder")
    model = TextEncoder().eval()
    draw_uneven_weights(model, options.seed, lambda weight: nn.init.normal_(weight, 0.0, 0.04))
    ids, mask = token_batches(options.batch * options.samples, options.seed + 1)
    export(model, options, {"input_ids": ids, "attention_mask": mask}, ["last_hidden_state", "pooled"])


if __name__ == "__main__":
    main()
