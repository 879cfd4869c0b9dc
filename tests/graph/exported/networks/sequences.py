"""Networks over tokens, sound and time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.graph.exported.networks.parts import Attention, Mlp


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, shared * self.size, bias=False)
        self.v = nn.Linear(width, shared * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm1(x)
        q = self.rotate(self.q(y).unflatten(-1, (self.heads, self.size)).transpose(1, 2), cos, sin)
        k = self.rotate(self.k(y).unflatten(-1, (self.shared, self.size)).transpose(1, 2), cos, sin)
        v = self.v(y).unflatten(-1, (self.shared, self.size)).transpose(1, 2)
        present = torch.cat((past, torch.stack((k, v))), 3)
        k, v = (part.repeat_interleave(self.heads // self.shared, 1) for part in present.unbind(0))
        scores = q @ k.transpose(-1, -2) * self.size**-0.5 + mask
        x = x + self.o((functional.softmax(scores, -1, dtype=torch.float32) @ v).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y)), present


class Llama(nn.Module):
    """Two layers with RMSNorm, rotary positions, grouped queries and a KV cache that the outputs extend."""

    def __init__(self, width: int = 32, vocabulary: int = 60) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(vocabulary, width), nn.ModuleList(LlamaLayer(width, 4, 2) for _ in "ab")
        self.norm, self.head = RmsNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, 4).float() / 4))

    def forward(self, tokens: Tensor, past_0: Tensor, past_1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before, length = past_0.shape[3], tokens.shape[1]
        position = torch.arange(length, device=tokens.device) + before
        angle = torch.cat((position[:, None] * self.frequencies,) * 2, -1)
        keys = torch.arange(before + length, device=tokens.device)
        mask = torch.where(keys[None] > position[:, None], torch.finfo(torch.float32).min, 0.0)
        x, presents = self.embed(tokens), []
        for layer, past in zip(self.layers, (past_0, past_1), strict=True):
            x, present = layer(x, angle.cos(), angle.sin(), mask, past)
            presents.append(present)
        return self.head(self.norm(x)), presents[0], presents[1]


class Whisper(nn.Module):
    """Whisper's encoder: two convolutions over a log-mel spectrogram, sine positions, two blocks before the norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(20, width, 3, padding=1), nn.Conv1d(width, width, 3, 2, 1)
        steps = torch.arange(24.0)[:, None] * torch.exp(torch.arange(width // 2) * -0.6)
        self.register_buffer("position", torch.cat((steps.sin(), steps.cos()), 1))
        self.attention = nn.ModuleList(Attention(width, 4) for _ in "ab")
        self.mlp = nn.ModuleList(Mlp(width, 4 * width) for _ in "ab")
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))

    def forward(self, mel: Tensor) -> Tensor:
        x = functional.gelu(self.conv2(functional.gelu(self.conv1(mel)))).transpose(1, 2) + self.position
        for k, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * k](x))
            x = x + mlp(self.norms[2 * k + 1](x))
        return self.norms[4](x)


class Lstm(nn.Module):
    """Two layers, the first in both directions, over 12 steps."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.LSTM(12, width, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(2 * width, width, batch_first=True)
        self.head = nn.Linear(width, 6)

    def forward(self, signal: Tensor) -> Tensor:
        x = self.second(self.first(signal)[0])[0]
        return self.head(x[:, -1])


class Gru(nn.Module):
    """A convolution over time, a GRU in both directions, a linear layer per step."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv, self.gru = (
            nn.Conv1d(12, width, 5, padding=2),
            nn.GRU(width, width, bidirectional=True, batch_first=True),
        )
        self.head = nn.Linear(2 * width, 6)

    def forward(self, signal: Tensor) -> Tensor:
        x = functional.relu(self.conv(signal.transpose(1, 2))).transpose(1, 2)
        return self.head(self.gru(x)[0]).log_softmax(-1)


class TextEncoder(nn.Module):
    """BERT in small: embeddings of tokens and positions, a finite mask of padding, two blocks after the norm."""

    def __init__(self, width: int = 32, vocabulary: int = 60, length: int = 16) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.attention = nn.ModuleList(Attention(width, 4) for _ in "ab")
        self.mlp = nn.ModuleList(Mlp(width, 4 * width) for _ in "ab")
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-12) for _ in range(5))
        self.pool = nn.Linear(width, width)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        mask = (1.0 - attention_mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.norms[0](x)
        for k, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = self.norms[2 * k + 1](x + attention(x, mask=mask))
            x = self.norms[2 * k + 2](x + mlp(x))
        return x, torch.tanh(self.pool(x[:, 0]))
