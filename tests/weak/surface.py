"""TensorRT 8 and 10 as far as the exported scripts use it, on networks that TensorRT-RTX's parser made.

Only names that the recorded lists have (tests/engines/tensorrt/api) can be used. What a network is told of its layers
is kept, and an attempt to tell one that takes no precision is an error, as it is in a build of TensorRT.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorrt_rtx as rtx

from tests.engines.tensorrt.api.record import HERE

UNTOLD = {"CONSTANT", "SHAPE", "CAST", "TRIP_LIMIT", "ITERATOR", "RECURRENCE", "LOOP_OUTPUT", "CONDITION"}


@cache
def names_of(version: str) -> frozenset[str]:
    """The recorded names of a version such as 8.5."""
    return frozenset((HERE / f"{version}.txt").read_text(encoding="utf-8").splitlines()[1:])


class Recorded:
    """Refuses names that the class of this version does not have."""

    _class = ""
    _names: frozenset[str] = frozenset()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            assert f"{type(self)._class}.{name}" in type(self)._names, f"no {type(self)._class}.{name}"
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            assert f"{type(self)._class}.{name}" in type(self)._names, f"no {type(self)._class}.{name}"
        super().__setattr__(name, value)


class Layer(Recorded):
    _class = "ILayer"

    def __init__(self, layer: Any, network: Any) -> None:
        self._layer, self._network = layer, network
        self._precision = rtx.float32
        self._types: dict[int, Any] = {}

    name = property(lambda self: self._layer.name)
    type = property(lambda self: self._layer.type)
    num_inputs = property(lambda self: self._layer.num_inputs)
    num_outputs = property(lambda self: self._layer.num_outputs)

    def get_input(self, index: int) -> Any:
        tensor = self._layer.get_input(index)
        return None if tensor is None else self._network._tensor(tensor)

    def get_output(self, index: int) -> Any:
        tensor = self._layer.get_output(index)
        return None if tensor is None else self._network._tensor(tensor)

    @property
    def precision(self) -> Any:
        return self._precision

    @precision.setter
    def precision(self, value: Any) -> None:
        assert self._layer.type.name not in UNTOLD, f"{self._layer.name} takes no precision"
        outputs = [self._layer.get_output(k) for k in range(self._layer.num_outputs)]
        assert not any(tensor.is_shape_tensor for tensor in outputs), f"{self._layer.name} computes a shape"
        if self._layer.name in self._network._deaf:
            return
        self._precision = value
        self._network._told[self._layer.name] = value

    def set_output_type(self, index: int, dtype: Any) -> None:
        tensor = self._layer.get_output(index)
        assert tensor.dtype in (rtx.float32, rtx.float16), f"{tensor.name} is {tensor.dtype}"
        self._types[index] = dtype
        self._network._types[tensor.name] = dtype


class Tensor(Recorded):
    _class = "ITensor"

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    name = property(lambda self: self._tensor.name)
    dtype = property(lambda self: self._tensor.dtype)
    shape = property(lambda self: self._tensor.shape)
    is_shape_tensor = property(lambda self: self._tensor.is_shape_tensor)
    is_execution_tensor = property(lambda self: self._tensor.is_execution_tensor)
    is_network_output = property(lambda self: self._tensor.is_network_output)


class Network(Recorded):
    """What is told of it lies in ``_told`` (layer -> precision) and ``_types`` (tensor -> type)."""

    _class = "INetworkDefinition"

    def __init__(self, network: Any, module: Any, deaf: frozenset[str] = frozenset()) -> None:
        self._network, self._module, self._deaf = network, module, deaf
        self._told: dict[str, Any] = {}
        self._types: dict[str, Any] = {}
        self._path = ""

    num_layers = property(lambda self: self._network.num_layers)
    num_inputs = property(lambda self: self._network.num_inputs)

    def get_layer(self, index: int) -> Any:
        return self._module._Layer(self._network.get_layer(index), self)

    def get_input(self, index: int) -> Any:
        return self._tensor(self._network.get_input(index))

    def _tensor(self, tensor: Any) -> Any:
        return self._module._Tensor(tensor)


class Log(rtx.ILogger):  # type: ignore[misc]
    def log(self, severity: Any, message: str) -> None:
        if severity <= rtx.ILogger.ERROR:
            self.messages = [*getattr(self, "messages", ()), message]


LOG = Log()
"""TensorRT-RTX's registry of plugins keeps no log alive."""


def make_module(version: str) -> Any:
    """A module ``tensorrt`` whose networks are wrapped; it parses and does no more."""
    names = names_of(".".join(version.split(".")[:2]))
    module: Any = ModuleType("tensorrt")
    module.__version__ = version
    assert {"DataType.HALF", "DataType.FLOAT"} <= names
    module.DataType = rtx.DataType
    module._Layer, module._Tensor, module._Network = (
        type(base.__name__, (base,), {"_names": names}) for base in (Layer, Tensor, Network)
    )
    return module


def parse(module: Any, path: Path) -> tuple[Any, Any]:
    """A network of the module's, and what keeps it alive."""
    rtx.init_libnvinfer_plugins(LOG, "")
    builder = rtx.Builder(LOG)
    network = builder.create_network(1 << int(rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = rtx.OnnxParser(network, LOG)
    if not parser.parse_from_file(str(path)):
        raise ValueError("; ".join(parser.get_error(k).desc() for k in range(parser.num_errors)))
    wrapped = module._Network(network, module)
    wrapped._path = str(path)
    return wrapped, (parser, builder)


def load_script(path: Path, module: Any, monkeypatch: Any) -> Any:
    """A script of the folder, imported with ``tensorrt`` being the module given."""
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.syspath_prepend(str(path.parent))
    for name in ("constraints", "build"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    if path.stem not in sys.builtin_module_names:  # time.py hides no module: Python's own is a part of the interpreter
        monkeypatch.setitem(sys.modules, path.stem, script)
    spec.loader.exec_module(script)
    return script
