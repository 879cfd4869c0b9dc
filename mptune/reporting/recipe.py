"""How to build the chosen model with NVIDIA's ``trtexec`` as the search built it: ``chosen/build.sh``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mptune.data.archive import read_sample_shapes
from mptune.errors import DataError
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.plan import PrecisionPlan
from mptune.run_json import RunFile
from mptune.settings import ShapeRange, TensorRtSettings
from mptune.targets.memory import default_workspace_mb
from mptune.tuning.front import Front

TRTEXEC_ON_JETPACK = "/usr/src/tensorrt/bin/trtexec"
"""Where JetPack's package ``libnvinfer-bin`` puts it, which is not on the PATH."""


ENGINE_FILE = "model.engine"
"""The very engine that was measured, where the toolchain builds files: another build may choose other kernels."""


MARKED_FILE = "marked.onnx"
"""model.onnx with outputs that only the engine has: trtexec marks debug tensors, and no outputs of an ONNX model."""


def is_on_cpu(front: Front) -> bool:
    """Whether the target is a CPU, which no engine is built for."""
    return front.target == "cpu"


@dataclass(frozen=True)
class BuildRecipe:
    """The settings of a run's builds that change the engine.

    Attributes:
        tf32: FP32 groups may use TF32, which trtexec and TensorRT's builder allow by default.
        shapes: of dynamic inputs.
        unknown: dynamic inputs whose shapes are not known.
        settings: workspace and optimization level.
        marked: values that the engine has as further outputs (``mptune.engines.marks``).
    """

    tf32: bool = False
    shapes: tuple[ShapeRange, ...] = ()
    unknown: tuple[str, ...] = ()
    settings: TensorRtSettings = field(default_factory=TensorRtSettings)
    marked: tuple[str, ...] = ()

    @classmethod
    def of(cls, file: RunFile, data_dir: Path, inputs: Sequence[TensorInfo]) -> BuildRecipe:
        """The recipe of a run: ``--shapes`` where it was given, else the shapes of its calibration samples."""
        fixed = file.fixed_settings
        given = {shape.name: shape for shape in fixed.shapes}
        dynamic = [i.name for i in inputs if i.shape is None or any(not isinstance(size, int) for size in i.shape)]
        missing = [name for name in dynamic if name not in given]
        given |= _observed(data_dir, missing) if missing else {}
        return cls(
            tf32=fixed.tf32,
            shapes=tuple(given[name] for name in dynamic if name in given),
            unknown=tuple(name for name in dynamic if name not in given),
            settings=_built_with(file),
        )

    def uses_tf32(self, plan: PrecisionPlan) -> bool:
        """Whether the engine of a plan was allowed TF32: that of all-FP32, the baseline, never is."""
        return self.tf32 and bool(plan.reduced_groups)

    def options(self, plan: PrecisionPlan) -> tuple[str, ...]:
        """The options of trtexec: names as of TensorRT 10.0 to 11 (samples/common/sampleOptions.cpp)."""
        options = [f"--onnx={MARKED_FILE if self.marked else 'model.onnx'}", "--stronglyTyped"]
        if not self.uses_tf32(plan):
            options.append("--noTF32")
        if self.shapes:
            options.append(f"--minShapes={self._spec(lambda shape: shape.smallest)}")
            options.append(f"--optShapes={self._spec(lambda shape: shape.usual)}")
            options.append(f"--maxShapes={self._spec(lambda shape: shape.largest)}")
        if self.settings.workspace_mb is not None:
            options.append(f"--memPoolSize=workspace:{self.settings.workspace_mb}")  # MiB
        if self.settings.optimization_level != TensorRtSettings().optimization_level:
            options.append(f"--builderOptimizationLevel={self.settings.optimization_level}")
        return tuple(options)

    def command(self, plan: PrecisionPlan) -> str:
        """The whole command as one line."""
        return shlex.join(("trtexec", *self.options(plan), f"--saveEngine={engine_name(plan)}"))

    def script(self, plan: PrecisionPlan) -> str:
        """``build.sh``: runs the command in its own directory; more options of trtexec may follow."""
        about_tf32 = "FP32 groups may use TF32" if self.uses_tf32(plan) else "TF32 is off"
        lines = [
            "#!/bin/sh",
            "# Builds the engine of model.onnx with TensorRT, on the device that will run it. Written by mptune.",
            f"# {about_tf32}, as in the search. Options that are given to this script go to trtexec after these.",
        ]
        if self.marked:
            lines.append(f"# {MARKED_FILE} is model.onnx with further outputs, without which the engine is wrong.")
            lines.append("# Give each an address (setTensorAddress) where you run the engine, and ignore its values.")
        for name in self.unknown:
            shown = re.sub(r"[^\x20-\x7e]", "?", name)
            lines.append(f"# The shapes of input {shown!r} are not known: give --minShapes, --optShapes, --maxShapes.")
        lines += [
            "set -eu",
            'cd "$(dirname "$0")"',
            f"trtexec=$(command -v trtexec || echo {TRTEXEC_ON_JETPACK})",
            " \\\n    ".join(
                ('exec "$trtexec"', *map(shlex.quote, self.options(plan)), f'--saveEngine={engine_name(plan)} "$@"')
            ),
        ]
        return "\n".join(lines) + "\n"

    def _spec(self, size: Callable[[ShapeRange], tuple[int, ...]]) -> str:
        return ",".join(f"{_name(shape.name)}:{'x'.join(map(str, size(shape)))}" for shape in self.shapes)


def _built_with(file: RunFile) -> TensorRtSettings:
    """The builder's settings; where a Jetson was measured, with the limit that TensorRT has there by default."""
    settings = file.fixed_settings.tensorrt
    jetson = None if file.environment is None else file.environment.jetson
    measured = file.target is not None and file.target.latency_source == "measured"
    if settings.workspace_mb is not None or jetson is None or not measured:
        return settings
    return replace(settings, workspace_mb=default_workspace_mb(jetson.memory_gb))


def engine_name(plan: PrecisionPlan) -> str:
    """The file that the recipe builds: never the engine that was measured, never that of another plan."""
    return f"model.{plan.fingerprint}.engine"


def _name(name: str) -> str:
    """In trtexec's single quotes where the name holds what separates names and sizes there."""
    return f"'{name}'" if re.search(r"[:,*]", name) else name


def _observed(data_dir: Path, names: Sequence[str]) -> dict[str, ShapeRange]:
    """The range of each input's shapes over all samples, as engines are built for; tuned for the first sample."""
    try:
        samples = [*read_sample_shapes(data_dir / "search.npz"), *read_sample_shapes(data_dir / "held_out.npz")]
    except DataError:
        return {}
    ranges = {}
    for name in names:
        shapes = [sample[name] for sample in samples if name in sample]
        if shapes and len({len(shape) for shape in shapes}) == 1:
            every = np.array(shapes, dtype=np.int64).reshape(len(shapes), -1)
            smallest, largest = every.min(axis=0).tolist(), every.max(axis=0).tolist()
            ranges[name] = ShapeRange(name, tuple(smallest), shapes[0], tuple(largest))
    return ranges
