"""A whole ``tensorrt`` of version 8 or 10 for the exported scripts: it parses with TensorRT-RTX, and what it builds
computes with ONNX Runtime in the types that its layers were told. Faults of real builds can be planted.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import onnx
import tensorrt_rtx as rtx
from onnx import ModelProto, TensorProto, helper

from tests.device import tensorrt
from tests.device.blueprint import Blueprint
from tests.device.building import IBuilderConfig, IHostMemory, ILogger
from tests.device.cuda import FakeCuda
from tests.device.engine import _TYPE_NAMES
from tests.device.native import Native, enumeration
from tests.weak import surface

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


@dataclass(frozen=True)
class Faults:
    """What goes wrong in a build.

    Attributes:
        ignored: nodes whose told precision is exchanged for the other.
        is_fp32: everything comes out in FP32 (NVIDIA/TensorRT#3160).
        obey: OBEY fails, "always" or only while shuffles are told types.
        deaf: layers that do not take a precision.
        is_blind: the inspector gives names only.
    """

    ignored: frozenset[str] = frozenset()
    is_fp32: bool = False
    obey: str = ""
    deaf: frozenset[str] = frozenset()
    is_blind: bool = False


BuilderFlag = enumeration("BuilderFlag", FP16=0, TF32=7, OBEY_PRECISION_CONSTRAINTS=8, PREFER_PRECISION_CONSTRAINTS=9)
NetworkDefinitionCreationFlag = enumeration("NetworkDefinitionCreationFlag", EXPLICIT_BATCH=0)


class Config(surface.Recorded, IBuilderConfig):
    _class = "IBuilderConfig"

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        self._flags = {BuilderFlag.TF32}

    @property
    def _shapes(self) -> Any:
        return {} if self._profile is None else self._profile._shapes


class Profile(Native):
    def __init__(self) -> None:
        self._shapes: dict[str, Any] = {}

    def set_shape(self, name: str, low: Any, usual: Any, high: Any) -> None:
        self._shapes[name] = tuple(tuple(shape) for shape in (low, usual, high))


class Parser(Native):
    def __init__(self, network: Any, logger: Any) -> None:
        self._network, self._module = network, network._module

    num_errors = 0

    def parse_from_file(self, path: str) -> bool:
        parsed, kept = surface.parse(self._module, path)
        self._network._network, self._network._kept, self._network._path = parsed._network, kept, path
        return True


def typed(path: str, network: Any, module: Any) -> ModelProto:
    """The model in the types that the layers were told, with Casts named as TensorRT names its reformats."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    faults, graph = module._faults, model.graph
    halves = {rtx.float16: TensorProto.FLOAT16, rtx.float32: TensorProto.FLOAT}
    told = {name: halves[kind] for name, kind in network._told.items()}
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    kinds |= {constant.name: constant.data_type for constant in graph.initializer}
    outputs = {value.name for value in graph.output}
    nodes = []

    def cast(source: str, result: str, kind: int, what: str) -> None:
        nodes.append(helper.make_node("Cast", [source], [result], f"Reformatting CopyNode for {what}", to=kind))

    for node in list(graph.node):
        kind = told.get(node.name, TensorProto.FLOAT)
        if node.name in faults.ignored:
            kind = FLOATS[kind == TensorProto.FLOAT]
        if faults.is_fp32:
            kind = TensorProto.FLOAT
        for slot, name in enumerate(node.input):
            if kinds.get(name) in FLOATS and kinds[name] != kind:
                node.input[slot] = f"{name} as {node.name}"
                cast(name, node.input[slot], kind, f"Input Tensor {slot} to {node.name}")
        after = []
        for slot, name in enumerate(node.output):
            if name in outputs and kinds.get(name) == TensorProto.FLOAT and kind != TensorProto.FLOAT:
                node.output[slot] = f"{name} of {node.name}"
                after.append((node.output[slot], name, TensorProto.FLOAT, f"Output Tensor {slot} to {node.name}"))
            elif kinds.get(name, TensorProto.FLOAT) in FLOATS:
                kinds[name] = kind
        nodes.append(node)
        for arguments in after:
            cast(*arguments)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(kept)
    return model


class Builder(Native):
    _module: Any = None

    def __init__(self, logger: Any) -> None:
        self._log = logger

    def create_network(self, flags: int) -> Any:
        module = self._module
        if module._number < (10,) and not flags & 1 << int(NetworkDefinitionCreationFlag.EXPLICIT_BATCH):
            raise AssertionError("ONNX models need an explicit batch")
        network = module._Network(None, module, module._faults.deaf)
        module._networks.append(network)
        return network

    def create_builder_config(self) -> Config:
        return type("IBuilderConfig", (Config,), {"_names": self._module._names})(self)

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Any, config: Config) -> IHostMemory | None:
        module, faults = self._module, self._module._faults
        module._configs.append(config)
        shuffles = {
            tensor.name
            for layer in map(network._network.get_layer, range(network._network.num_layers))
            for tensor in map(layer.get_output, range(layer.num_outputs))
            if layer.type == rtx.LayerType.SHUFFLE
        }
        obeys = BuilderFlag.OBEY_PRECISION_CONSTRAINTS in config._flags
        if obeys and (faults.obey == "always" or (faults.obey == "shuffles" and shuffles & network._types.keys())):
            self._log._say("ERROR", "Error Code 10: Could not find any implementation for node n0002")
            return None
        model = typed(network._path, network, module)
        fields = {"version": module.__version__, "capability": module._capability, "shapes": config._shapes}
        return IHostMemory(Blueprint.of_model(model, tf32=BuilderFlag.TF32 in config._flags, **fields).to_bytes())


class Engine(tensorrt._Engine10):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        nodes = [node for node, *_ in self._program.layers]
        self._layers = tuple(replace(layer, name=n.name) for layer, n in zip(self._layers, nodes, strict=True))

    def _describe(self, is_known: bool) -> dict[str, Any]:
        """The inspector's JSON, with the names of tensors; metadata of layers from 8.6 on."""
        has_metadata = tuple(map(int, self._blueprint.version.split(".")[:2])) >= (8, 6)
        constants = {constant.name for constant in self._program.model.graph.initializer}
        layers = []
        for node, read, made in self._program.layers:
            sides = [(node.input, read), (node.output, made)]
            tensors = [
                [
                    {"Name": name, "Format/Datatype": f"Row major linear {_TYPE_NAMES.get(kind, '')} format"}
                    for name, kind in zip(filter(None, names), types, strict=True)
                    if name not in constants
                ]
                for names, types in sides
            ]
            metadata = f"[ONNX Layer: {node.name}]" if has_metadata and node.op_type != "Cast" else ""
            layers.append({"Name": node.name, "Inputs": tensors[0], "Outputs": tensors[1], "Metadata": metadata})
            if not is_known:
                layers[-1] |= {"Inputs": [], "Outputs": []}
        if self._is_blind:
            return {"Layers": [layer["Name"] for layer in layers]}
        return {"Layers": layers}


def make_module(
    version: str, cuda: FakeCuda, faults: Faults | None = None, capability: tuple[int, int] = (8, 7)
) -> Any:
    """The module; ``_networks`` and ``_configs`` keep what was built."""
    module = tensorrt.make_module(version, cuda, capability)
    wrapped = surface.make_module(version)
    for name in ("DataType", "_Layer", "_Tensor", "_Network"):
        setattr(module, name, getattr(wrapped, name))
    module._faults, module._networks, module._configs = faults or Faults(), [], []
    module.BuilderFlag, module.OnnxParser, module.ILogger = BuilderFlag, Parser, ILogger
    module.Builder = type("Builder", (Builder,), {"_module": module})
    module.ICudaEngine = type("ICudaEngine", (Engine,), {"_is_blind": module._faults.is_blind})
    module._names = surface.names_of(".".join(map(str, module._number)))
    if module._number < (10,):
        module.NetworkDefinitionCreationFlag = NetworkDefinitionCreationFlag
        for name in [name for name in vars(module) if not name.startswith("_") and name not in module._names]:
            delattr(module, name)
    return module


class Library:
    """libcudart, as ctypes gives it, on the device in host memory."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def __getattr__(self, name: str) -> Any:
        if name == "cudaGetErrorString":
            return lambda error: self._cuda.cudaGetErrorString(error)[1]

        def call(*arguments: Any) -> int:
            places = [each._obj for each in arguments if hasattr(each, "_obj")]
            given = [getattr(each, "value", each) for each in arguments if not hasattr(each, "_obj")]
            if name == "cudaGraphInstantiate":
                given = given[:2]
            error, *results = getattr(self._cuda, name)(*given)
            for place, result in zip(places, results, strict=False):
                if result is not None:
                    place.value = result if isinstance(place, ctypes.c_float) else int(result)
            return int(error)

        return call
