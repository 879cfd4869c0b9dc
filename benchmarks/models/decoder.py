"""Export decoder blocks as Llama has them (Touvron et al., arXiv 2302.13971): RMSNorm, rotary embedding, gated MLP.

Width 512, 8 layers, 8 heads of which pairs share keys and values, causal mask. Weights are drawn. A few channels of the
residual stream carry values in the thousands from the third layer on, as in trained decoders ("massive activations":
Sun et al., arXiv 2402.17762): a down projection writes them, and later norms have small gains there. Their squares
overflow FP16 inside an RMSNorm.

    python -m benchmarks.models.decoder --out decoder --batch 8     # decoder.onnx (110 MB) and decoder.npz
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from benchmarks.models.exporting import draw_uneven_weights, export, parse

VOCABULARY, LENGTH, WIDTH, DEPTH, HEADS, SHARED, HIDDEN = 4096, 96, 512, 8, 8, 4, 1408
MASSIVE, MASSIVE_FROM, MASSIVE_CHANNELS = 3000.0, 2, (7, 133, 401)
"""The largest values of the residual stream, the layer that writes them, and the channels that carry them."""


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def rotary(length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding (Su et al., arXiv 2104.09864), shape (length, width) each."""
    rates = 10000.0 ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), rates)
    both = torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


def turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat([-second, first], -1) * sines


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.norm1, self.norm2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.query, self.proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, SHARED * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        head = WIDTH // HEADS

        def heads(y: torch.Tensor, count: int) -> torch.Tensor:
            return y.reshape(batch, length, count, head).transpose(1, 2)

        y = self.norm1(x)
        query = turned(heads(self.query(y), HEADS), cosines, sines)
        key = turned(heads(self.key(y), SHARED), cosines, sines).repeat_interleave(HEADS // SHARED, 1)
        value = heads(self.value(y), SHARED).repeat_interleave(HEADS // SHARED, 1)
        scores = query @ key.transpose(-2, -1) / head**0.5 + mask
        x = x + self.proj((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        cosines, sines = rotary(LENGTH, WIDTH // HEADS)
        self.register_buffer("cosines", cosines)
        self.register_buffer("sines", sines)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e4).triu(1))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines, self.mask)
        return self.head(self.norm(x))


@torch.no_grad()
def make_massive(model: Decoder, ids: torch.Tensor) -> None:
    """Let one block write values in the thousands into a few channels, and later norms take them out again."""
    channels, block = list(MASSIVE_CHANNELS), model.blocks[MASSIVE_FROM]
    seen: list[torch.Tensor] = []
    handle = block.down.register_forward_hook(lambda module, arguments, result: seen.append(result))
    model(ids)
    handle.remove()
    block.down.weight[channels] *= MASSIVE / seen[0][..., channels].abs().amax((0, 1))[:, None]
    for later in [*model.blocks[MASSIVE_FROM + 1 :], model]:
        for norm in (getattr(later, name, None) for name in ("norm1", "norm2", "norm")):
            if norm is not None:
                norm.weight[channels] = 0.01


def main() -> None:
    options = parse(__doc__, "decoder")
    model = Decoder().eval()
    draw_uneven_weights(model, options.seed, lambda weight: nn.init.normal_(weight, 0.0, 0.04))
    rng = np.random.default_rng(options.seed + 1)
    share = 1.0 / np.arange(1, VOCABULARY + 1)
    ids = rng.choice(VOCABULARY, (options.batch * options.samples, LENGTH), p=share / share.sum()).astype(np.int64)
    make_massive(model, torch.from_numpy(ids[: options.batch]))
    export(model, options, {"input_ids": ids}, ["logits"])


if __name__ == "__main__":
    main()
