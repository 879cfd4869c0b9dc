"""After which steps a provider rounds to FP16: its outputs against formulas, value by value.

    python -m benchmarks.roundings

Each case is a model of a few FP16 nodes, as mptune writes them, with formulas for its output: all steps rounded, or
some of them in FP32. The formula with the largest share of bit-identical values is the provider's, and
``mptune.graph.writing.rounding_steps`` has to follow it. Products sum 16 values, so the order of summation hardly
matters.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from scipy.special import erf, ndtr

from benchmarks.common import save
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import SessionOptions

OPSET, IR_VERSION = 17, 8
ROWS, COLUMNS = 512, 16
SCALE = np.float16(0.3)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, COLUMNS)).astype(np.float16)
V = RNG.normal(size=(COLUMNS, COLUMNS)).astype(np.float16)
B = RNG.normal(size=COLUMNS).astype(np.float16)
IMAGE = RNG.normal(size=(8, 16, 7, 7)).astype(np.float16)
KERNEL = RNG.normal(size=(16, 16, 1, 1)).astype(np.float16)


def half(values: np.ndarray) -> np.ndarray:
    """FP16's nearest values, in double precision."""
    return np.asarray(values).astype(np.float16).astype(np.float64)


def exact(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64)


Step = tuple[str, tuple[str, ...], str, Mapping[str, Any]]
"""Operator, inputs, output and attributes."""


@dataclass(frozen=True)
class Case:
    """Nodes from ``x`` to ``y``, their constants, the input, and the candidate formulas."""

    nodes: tuple[Step, ...]
    constants: Mapping[str, np.ndarray]
    x: np.ndarray
    formulas: Mapping[str, Callable[[], np.ndarray]]


def _gelu_in_steps(x: np.ndarray, factor: float) -> np.ndarray:
    found: np.ndarray = half(x * 0.5 * half(1.0 + half(erf(half(x * factor)))))
    return found


def _conv() -> np.ndarray:
    found: np.ndarray = np.einsum("oi,nihw->nohw", exact(KERNEL)[:, :, 0, 0], exact(IMAGE))
    return found


_GELU: tuple[Step, ...] = (
    ("Div", ("a", "root"), "b", {}),
    ("Erf", ("b",), "c", {}),
    ("Add", ("c", "one"), "d", {}),
    ("Mul", ("a", "d"), "e", {}),
    ("Mul", ("e", "half"), "y", {}),
)
_GELU_CONSTANTS = {"root": np.float16(np.sqrt(2.0)), "one": np.float16(1.0), "half": np.float16(0.5)}
_PRODUCT, _ADDED = half(exact(X) @ exact(V)), half(exact(X) + exact(B))

CASES = {
    "product, then a scale": Case(
        (("MatMul", ("x", "v"), "t", {}), ("Mul", ("t", "scale"), "y", {})),
        {"v": V, "scale": SCALE},
        X,
        {
            "rounded once": lambda: half(exact(X) @ exact(V) * exact(SCALE)),
            "rounded in between": lambda: half(_PRODUCT * exact(SCALE)),
        },
    ),
    "a scale, then the product": Case(
        (("Mul", ("x", "scale"), "t", {}), ("MatMul", ("t", "v"), "y", {})),
        {"v": V, "scale": SCALE},
        X,
        {
            "rounded once": lambda: half(exact(X) @ exact(V) * exact(SCALE)),
            "rounded in between": lambda: half(half(exact(X) * exact(SCALE)) @ exact(V)),
        },
    ),
    "product and bias": Case(
        (("MatMul", ("x", "v"), "t", {}), ("Add", ("t", "bias"), "y", {})),
        {"v": V, "bias": B},
        X,
        {
            "rounded once": lambda: half(exact(X) @ exact(V) + exact(B)),
            "rounded in between": lambda: half(_PRODUCT + exact(B)),
        },
    ),
    "GELU": Case(
        (("Add", ("x", "bias"), "a", {}), *_GELU),
        {"bias": B, **_GELU_CONSTANTS},
        X,
        {
            "each step rounded": lambda: _gelu_in_steps(_ADDED, 1.0 / float(np.float16(np.sqrt(2.0)))),
            "each step, times FP16's 0.7071": lambda: _gelu_in_steps(_ADDED, float(np.float16(np.sqrt(0.5)))),
            "distribution rounded": lambda: half(_ADDED * half(ndtr(_ADDED))),
            "FP32 behind the bias": lambda: half(_ADDED * ndtr(_ADDED)),
            "FP32 throughout": lambda: half((exact(X) + exact(B)) * ndtr(exact(X) + exact(B))),
        },
    ),
    "convolution and bias": Case(
        (("Conv", ("x", "k", "bias"), "y", {}),),
        {"k": KERNEL, "bias": B},
        IMAGE,
        {
            "rounded once": lambda: half(_conv() + exact(B)[:, None, None]),
            "rounded in between": lambda: half(half(_conv()) + exact(B)[:, None, None]),
        },
    ),
    "mean over the last axes": Case(
        (("ReduceMean", ("x",), "y", {"axes": [2, 3], "keepdims": 0}),),
        {},
        IMAGE,
        {
            "rounded once": lambda: half(exact(IMAGE).mean(axis=(2, 3))),
            "sum rounded": lambda: half(half(exact(IMAGE).sum(axis=(2, 3))) / 49),
        },
    ),
}


def outputs(case: Case, provider: str, folder: Path) -> np.ndarray:
    """The provider's outputs."""
    nodes = [helper.make_node(op, list(inputs), [out], **more) for op, inputs, out, more in case.nodes]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, case.x.shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in case.constants.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    path = folder / "case.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION), path)
    session = open_session(path, SessionOptions(provider, timing=False))  # type: ignore[arg-type]
    try:
        return session.run({"x": case.x})["y"].astype(np.float64)
    finally:
        session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            found = outputs(case, options.provider, Path(folder))
            rows[name] = {formula: float(np.mean(found == values())) for formula, values in case.formulas.items()}
            print(name)
            for formula, share in sorted(rows[name].items(), key=lambda row: -row[1]):
                print(f"  {share:6.1%}  {formula}")
    save(options.json, {"provider": options.provider, "same_values": rows})


if __name__ == "__main__":
    main()
