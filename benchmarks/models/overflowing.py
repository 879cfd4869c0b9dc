"""Four networks whose values leave FP16's range, by onnx.helper alone: what BF16 is for.

    python -m benchmarks.models.overflowing decoder --out decoder      # decoder.onnx and decoder.npz

``decoder``: an image decoder whose residual stream grows into the thousands, with norms written out. ``matching``:
correlations of features that are not normalised, before a softmax over all positions. ``transformer``: norms written
out over a residual stream with a few channels of large activations, as trained ones have them (Sun et al., "Massive
Activations in Large Language Models", arXiv 2402.17762). ``linear_attention``: attention by exponential features
without a shift (Katharopoulos et al., arXiv 2006.16236), whose sums grow with the exponentials.

Opset 22, where convolutions have BF16. Weights are drawn, so errors are these networks', not a trained one's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 22
TOKENS, WIDTH, HEADS, BLOCKS = 512, 256, 4, 4
SIDE, CHANNELS = 48, 128


class Network:
    """Collects nodes and weights; every method returns the name of what it adds."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._count = 0

    def op(self, op_type: str, *inputs: str, scope: str = "", **attributes: object) -> str:
        self._count += 1
        name = f"{scope}/{op_type}_{self._count}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def constant(self, values: object, dtype: type = np.float32) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def draw(self, *shape: int, scale: float = 1.0) -> str:
        fan_in = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
        return self.constant(self.rng.standard_normal(shape) * scale * fan_in**-0.5)

    def linear(self, x: str, before: int, after: int, scope: str, scale: float = 1.0) -> str:
        product = self.op("MatMul", x, self.draw(before, after, scale=scale), scope=scope)
        return self.op("Add", product, self.constant(self.rng.standard_normal(after) * 0.02), scope=scope)

    def conv(self, x: str, before: int, after: int, kernel: int, scope: str, scale: float = 1.0) -> str:
        weight = self.draw(after, before, kernel, kernel, scale=scale)
        bias = self.constant(self.rng.standard_normal(after) * 0.02)
        return self.op("Conv", x, weight, bias, scope=scope, pads=[kernel // 2] * 4, kernel_shape=[kernel, kernel])

    def norm(self, x: str, width: int, axis: int, scope: str) -> str:
        """A layer norm over one axis, written out, with the square as a product."""
        axes = self.constant([axis], np.int64)
        centred = self.op("Sub", x, self.op("ReduceMean", x, axes, scope=scope), scope=scope)
        square = self.op("Mul", centred, centred, scope=scope)
        variance = self.op("ReduceMean", square, axes, scope=scope)
        guarded = self.op("Add", variance, self.constant(1e-5), scope=scope)
        divided = self.op("Div", centred, self.op("Sqrt", guarded, scope=scope), scope=scope)
        shape = [width] + [1] * (-1 - axis)
        gain = self.constant(1 + 0.2 * self.rng.standard_normal(shape))
        return self.op("Mul", divided, gain, scope=scope)

    def silu(self, x: str, scope: str) -> str:
        return self.op("Mul", x, self.op("Sigmoid", x, scope=scope), scope=scope)

    def heads(self, x: str, scope: str, order: tuple[int, ...] = (0, 2, 1, 3)) -> str:
        shape = self.constant([0, TOKENS, HEADS, WIDTH // HEADS], np.int64)
        return self.op("Transpose", self.op("Reshape", x, shape, scope=scope), scope=scope, perm=list(order))

    def joined(self, x: str, scope: str) -> str:
        merged = self.op("Transpose", x, scope=scope, perm=[0, 2, 1, 3])
        return self.op("Reshape", merged, self.constant([0, TOKENS, WIDTH], np.int64), scope=scope)

    def finish(self, inputs: Mapping[str, tuple[int, ...]], output: str) -> onnx.ModelProto:
        self.nodes.append(helper.make_node("Identity", [output], ["y"], name="y"))
        given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", *s]) for n, s in inputs.items()]
        result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
        graph = helper.make_graph(self.nodes, self.name, given, result, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)


def decoder(net: Network) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]:
    x = net.conv("latent", 8, CHANNELS, 3, "/stem", 3.0)
    for k in range(BLOCKS):
        scope = f"/block{k}"
        h = net.silu(net.norm(x, CHANNELS, -3, scope), scope)
        h = net.conv(h, CHANNELS, CHANNELS, 3, scope, 2.0)
        h = net.silu(net.norm(h, CHANNELS, -3, f"{scope}/inner"), f"{scope}/inner")
        # The stream grows from block to block; the shortcut sums it up without a norm before it.
        x = net.op("Add", net.conv(x, CHANNELS, CHANNELS, 1, f"{scope}/skip", 5.0 + k), net.conv(
            h, CHANNELS, CHANNELS, 3, f"{scope}/out", 200.0), scope=scope)  # fmt: skip
    y = net.conv(net.silu(net.norm(x, CHANNELS, -3, "/head"), "/head"), CHANNELS, 3, 3, "/head")
    inputs = {"latent": (8, SIDE, SIDE)}
    return net.finish(inputs, net.op("Tanh", y, scope="/head")), inputs


def matching(net: Network) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]:
    def features(x: str, weights: list[str], scope: str) -> str:
        for k, weight in enumerate(weights):
            x = net.op("MatMul", x, weight, scope=f"{scope}/{k}")
            x = net.op("Relu", x, scope=f"{scope}/{k}") if k + 1 < len(weights) else x
        return x

    weights = [net.draw(32, WIDTH, scale=4.0), *(net.draw(WIDTH, WIDTH, scale=1.6) for _ in range(3))]
    weights[-1] = net.draw(WIDTH, WIDTH, scale=6.0)
    one, other = (features(name, weights, f"/{name}") for name in ("first", "second"))
    scores = net.op("MatMul", one, net.op("Transpose", other, scope="/corr", perm=[0, 2, 1]), scope="/corr")
    sharp = net.op("Mul", scores, net.constant(1.0 / 30000), scope="/corr")
    matches = net.op("Softmax", sharp, scope="/corr", axis=-1)
    grid = np.stack(np.meshgrid(np.linspace(-1, 1, 32), np.linspace(-1, 1, TOKENS // 32)), -1).reshape(TOKENS, 2)
    flow = net.op("MatMul", matches, net.constant(grid), scope="/flow")
    hidden = net.linear(net.op("Concat", flow, one, scope="/refine", axis=-1), WIDTH + 2, WIDTH, "/refine", 0.05)
    hidden = net.linear(net.op("Relu", hidden, scope="/refine"), WIDTH, WIDTH, "/refine/1")
    update = net.linear(net.op("Relu", hidden, scope="/refine/1"), WIDTH, 2, "/refine/2", 0.05)
    inputs = {"first": (TOKENS, 32), "second": (TOKENS, 32)}
    return net.finish(inputs, net.op("Add", flow, update, scope="/out")), inputs


def transformer(net: Network) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]:
    x = net.linear("tokens", 64, WIDTH, "/embed")
    massive = np.zeros(WIDTH)
    massive[net.rng.choice(WIDTH, 4, replace=False)] = (1500.0, -900.0, 700.0, -2200.0)
    x = net.op("Add", x, net.constant(massive), scope="/embed")
    for k in range(BLOCKS):
        scope = f"/block{k}"
        h = net.norm(x, WIDTH, -1, f"{scope}/norm1")
        q, key, v = (net.linear(h, WIDTH, WIDTH, f"{scope}/{name}") for name in ("q", "k", "v"))
        turned = net.heads(key, scope, (0, 2, 3, 1))
        scores = net.op("MatMul", net.heads(q, scope), turned, scope=scope)
        scaled = net.op("Mul", scores, net.constant((WIDTH // HEADS) ** -0.5), scope=scope)
        mixed = net.op("MatMul", net.op("Softmax", scaled, scope=scope, axis=-1), net.heads(v, scope), scope=scope)
        x = net.op("Add", x, net.linear(net.joined(mixed, scope), WIDTH, WIDTH, f"{scope}/proj"), scope=scope)
        h = net.norm(x, WIDTH, -1, f"{scope}/norm2")
        h = net.silu(net.linear(h, WIDTH, 4 * WIDTH, f"{scope}/fc1"), f"{scope}/fc1")
        x = net.op("Add", x, net.linear(h, 4 * WIDTH, WIDTH, f"{scope}/fc2", 3.0), scope=scope)
    y = net.linear(net.norm(x, WIDTH, -1, "/head"), WIDTH, 64, "/head")
    inputs = {"tokens": (TOKENS, 64)}
    return net.finish(inputs, y), inputs


def linear_attention(net: Network) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]:
    x = net.linear("tokens", 64, WIDTH, "/embed")
    ones = net.constant([-2], np.int64)
    for k in range(BLOCKS):
        scope = f"/block{k}"
        h = net.op("LayerNormalization", x, net.constant(np.ones(WIDTH)), scope=f"{scope}/norm1", axis=-1)
        scale = 3.0
        q, key = (
            net.op("Exp", net.heads(net.linear(h, WIDTH, WIDTH, f"{scope}/{n}", scale), scope), scope=f"{scope}/{n}")
            for n in ("q", "k")
        )
        v = net.heads(net.linear(h, WIDTH, WIDTH, f"{scope}/v"), scope)
        turned = net.op("Transpose", key, scope=scope, perm=[0, 1, 3, 2])
        gathered = net.op("MatMul", q, net.op("MatMul", turned, v, scope=scope), scope=scope)
        total = net.op("Mul", q, net.op("ReduceSum", key, ones, scope=scope), scope=scope)
        weight = net.op("ReduceSum", total, net.constant([-1], np.int64), scope=scope)
        mixed = net.joined(net.op("Div", gathered, weight, scope=scope), scope)
        x = net.op("Add", x, net.linear(mixed, WIDTH, WIDTH, f"{scope}/proj"), scope=scope)
        h = net.op("LayerNormalization", x, net.constant(np.ones(WIDTH)), scope=f"{scope}/norm2", axis=-1)
        h = net.silu(net.linear(h, WIDTH, 4 * WIDTH, f"{scope}/fc1"), f"{scope}/fc1")
        x = net.op("Add", x, net.linear(h, 4 * WIDTH, WIDTH, f"{scope}/fc2"), scope=scope)
    inputs = {"tokens": (TOKENS, 64)}
    return net.finish(inputs, net.linear(x, WIDTH, 64, "/head")), inputs


NETWORKS: Mapping[str, Callable[[Network], tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]]] = {
    "decoder": decoder,
    "matching": matching,
    "transformer": transformer,
    "linear_attention": linear_attention,
}


def write(name: str, stem: Path, *, samples: int, batch: int, seed: int = 0) -> tuple[Path, Path]:
    """Write the model and its data.

    Args:
        name: of ``NETWORKS``.
        stem: ``.onnx`` and ``.npz`` are appended.
        samples: calibration batches.
        batch: rows of each.
        seed: of weights and data.

    Returns:
        The two paths.
    """
    model, inputs = NETWORKS[name](Network(name, seed))
    onnx.checker.check_model(model, full_check=True)
    path, data = stem.with_suffix(".onnx"), stem.with_suffix(".npz")
    onnx.save(model, path)
    rng = np.random.default_rng(seed + 1)
    arrays = {n: rng.standard_normal((samples * batch, *shape)).astype(np.float32) for n, shape in inputs.items()}
    if name == "matching":  # what is matched is the same, moved and a little changed
        arrays["second"] = np.roll(arrays["first"], 7, axis=1) + 0.1 * arrays["second"]
    np.savez(data, **arrays)
    return path, data


def add_options(parser: argparse.ArgumentParser, *, samples: int, predicted: str) -> None:
    """What every benchmark of these networks takes.

    Args:
        parser: of the benchmark.
        samples: of each network, unless stated.
        predicted: what the benchmark does where there is no GPU.
    """
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--model", nargs=2, type=Path, metavar=("MODEL", "DATA"), help="another network")
    parser.add_argument("--opset", type=int, help="with --model: raise it to this operator set")
    parser.add_argument("--predicted", action="store_true", help=f"{predicted}; no GPU")
    parser.add_argument("--limit", type=float, default=520.0, help="seconds, shared among the networks")
    parser.add_argument("--samples", type=int, default=samples)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", type=Path)


def each_network(options: argparse.Namespace) -> Iterator[tuple[str, Path, Path, Path, float]]:
    """Name, model and data of each network, a folder until the next one is taken, and when to end.

    The end is a time of ``time.monotonic``: what is left of ``--limit``, shared among the networks that are left.
    """
    names = [options.model[0].stem] if options.model else options.networks
    end = time.monotonic() + options.limit
    for index, name in enumerate(names):
        now = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            path, data = options.model or write(name, place / name, samples=options.samples, batch=options.batch)
            yield name, path.resolve(), data, place, now + (end - now) / (len(names) - index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NETWORKS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    for path in write(options.name, options.out, samples=options.samples, batch=options.batch):
        print(path)


if __name__ == "__main__":
    main()
