"""Train a small text encoder on Python's standard library and export it: what is a line, code or prose?

Comments and docstrings are prose, without their markers; everything else is code. Lines are bytes, so there is no
vocabulary. The texts come with every Python (PSF licence); nothing is downloaded. Files are split, not lines: a
held-out line is from a file that training never saw. Writes line_encoder.onnx (0.5 MB), line_encoder.npz and
line_encoder_labels.npz; takes minutes on two CPU cores:

    python -m benchmarks.models.line_encoder
"""

from __future__ import annotations

import argparse
import ast
import io
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.models.exporting import export
from benchmarks.models.text_encoder import Layer

HERE = Path(__file__).resolve().parent
LENGTH, WIDTH, DEPTH, HEADS = 64, 64, 2, 4
CODE, PROSE = 0, 1
SHORTEST = 12
"""Characters of a line that is used."""

MASKED = -1e9
"""Added to the attention scores of padding: beyond FP16, where it is -inf."""


class LineEncoder(nn.Module):
    """Bytes of a line, (N, 64) with zeros behind its end, to an embedding of unit length (N, 64) and scores (N, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, LENGTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(Layer(LENGTH, WIDTH, HEADS) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = (text != 0).float()
        mask = (1.0 - given)[:, None, None, :] * MASKED
        x = self.norm(self.bytes(text) + self.positions)
        for layer in self.layers:
            x = layer(x, mask)
        mean = (x * given[:, :, None]).sum(1) / given.sum(1, keepdim=True)
        return mean / mean.pow(2).sum(1, keepdim=True).sqrt(), self.head(mean)


def lines_of(source: str) -> Iterator[tuple[str, int]]:
    """The lines of a Python file with their kinds."""
    rows = source.splitlines()
    prose: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            text = node.body[0]
            for row in range(text.lineno, (text.end_lineno or text.lineno) + 1):
                prose[row] = rows[row - 1].strip().strip("'\"rR").strip()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            prose[token.start[0]] = token.string.lstrip("#!: ").strip()
    for number, row in enumerate(rows, 1):
        text, kind = (prose[number], PROSE) if number in prose else (row.strip(), CODE)
        if len(text) >= SHORTEST and text.isascii() and not text.startswith(">>>"):
            yield text, kind


def encoded(texts: list[str]) -> np.ndarray:
    """Bytes of each text, int64 (n, 64); the rest of a row is 0."""
    rows = np.zeros((len(texts), LENGTH), np.int64)
    for row, text in zip(rows, texts, strict=True):
        values = np.frombuffer(text.encode()[:LENGTH], np.uint8)
        row[: len(values)] = values
    return rows


def load(files: list[Path], count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """As many lines of code as of prose from some files."""
    found: list[tuple[str, int]] = []
    for path in files:
        try:
            found += set(lines_of(path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError):
            continue
    found.sort()
    random = np.random.default_rng(seed)
    random.shuffle(found)
    kinds = {kind: [text for text, k in found if k == kind][: count // 2] for kind in (CODE, PROSE)}
    texts = kinds[CODE] + kinds[PROSE]
    labels = np.repeat([CODE, PROSE], [len(kinds[CODE]), len(kinds[PROSE])])
    order = random.permutation(len(texts))
    return encoded(texts)[order], labels[order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder")
    parser.add_argument("--lines", type=int, default=12_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held_out = files[::5]
    x, y = load([path for path in files if path not in held_out], options.lines, options.seed)
    test_x, test_y = load(held_out, 2_000, options.seed + 1)

    model = LineEncoder()
    steps = options.epochs * -(-len(x) // 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for epoch in range(options.epochs):
        for rows in torch.randperm(len(x)).split(128):
            loss = nn.functional.cross_entropy(model(torch.from_numpy(x[rows]))[1], torch.from_numpy(y[rows]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        scores = model(torch.from_numpy(test_x))[1].numpy()
    accuracy = (scores.argmax(1) == test_y).mean()
    print(f"{len(x)} lines to train; accuracy on {len(test_x)} held-out lines {accuracy:.4f}")

    options.out, options.batch, options.opset = options.out / "line_encoder", 2, 17
    axes = {name: {0: "batch"} for name in ("text", "embedding", "scores")}
    export(model, options, {"text": test_x[:96]}, ["embedding", "scores"], dynamic_axes=axes)
    np.savez_compressed(options.out.with_name("line_encoder_labels.npz"), scores=test_y[:96])


if __name__ == "__main__":
    main()
