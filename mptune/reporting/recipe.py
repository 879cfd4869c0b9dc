"""How to build the chosen model with NVIDIA's ``trtexec`` as the search built it: ``chosen/build.sh``.

And ``weak/``: a plan for TensorRT 8, which has no strong typing, as a model in FP32 and a command of trtexec.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from mptune.data.archive import read_sample_shapes, read_samples
from mptune.engines.loading import check_written
from mptune.engines.tensorrt.backend import TIMING_CACHE
from mptune.engines.tensorrt.library import exports_creators
from mptune.errors import DataError, PlanError, RunError
from mptune.files import write_text
from mptune.graph.groups import GroupedModel
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.weak import WeakModel, weak_model
from mptune.printable import printable
from mptune.reporting.text import fill_template
from mptune.run_json import RunFile
from mptune.settings import TensorRtSettings
from mptune.targets.costs import default_workspace_mb
from mptune.tuning.front import Front

TRTEXEC_OF_PACKAGE = "/usr/src/tensorrt/bin/trtexec"
"""Where the package ``libnvinfer-bin`` puts it, JetPack's as well; that is not on the PATH."""

NO_TRTEXEC = (
    "sudo apt install libnvinfer-bin puts it into /usr/src/tensorrt/bin; NVIDIA's archive of TensorRT has it in its "
    "folder bin"
)
"""Where to get trtexec. Source: NVIDIA/TensorRT#2780."""

_LONGEST_ARGUMENT = (128 << 10) - 1
"""Bytes of one argument on Linux (MAX_ARG_STRLEN in include/uapi/linux/binfmts.h)."""

Range: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]"
"""Smallest, usual and largest: shapes of a dynamic input, or values of one that decides a shape."""

ENGINE_FILE = "model.engine"
"""The very engine that was measured, where the toolchain builds files: another build may choose other kernels."""


def is_on_cpu(front: Front) -> bool:
    """Whether the target is a CPU, which no engine is built for."""
    return front.target == "cpu"


@dataclass(frozen=True)
class BuildRecipe:
    """The settings of a run's builds that change the engine.

    Attributes:
        tf32: FP32 groups may use TF32, which trtexec and TensorRT's builder allow by default.
        ranges: by input.
        unknown: inputs whose shapes or values are not known, or whose names cannot be passed.
        settings: workspace and optimization level.
        timing_cache: the run has one, and a copy lies beside ``build.sh``.
        plugins: paths of libraries with plugins of the user's.
    """

    tf32: bool = False
    ranges: Mapping[str, Range] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    settings: TensorRtSettings = field(default_factory=TensorRtSettings)
    timing_cache: bool = False
    plugins: tuple[str, ...] = ()

    @classmethod
    def for_run(
        cls, file: RunFile, data_dir: Path, inputs: Sequence[TensorInfo], deciding: Iterable[str] = ()
    ) -> BuildRecipe:
        """The recipe of a run: ``--shapes`` where it was given, else as its calibration samples have it.

        ``deciding`` are the inputs whose values decide a shape: trtexec reads these values as it reads shapes.
        """
        fixed = file.fixed_settings
        dynamic = [i.name for i in inputs if i.shape is None or any(not isinstance(size, int) for size in i.shape)]
        given: dict[str, Range] = {each.name: (each.smallest, each.usual, each.largest) for each in fixed.shapes}
        given |= _observed(data_dir, [name for name in dynamic if name not in given], list(deciding))
        wanted = [i.name for i in inputs if i.name in {*dynamic, *deciding}]
        plain = [name for name in wanted if name == printable(name) and not _SEPARATORS & set(name)]
        passed = [name for name in plain if name in given]
        settings: TensorRtSettings = fixed.tensorrt
        jetson = None if file.environment is None else file.environment.jetson
        is_measured = file.target is not None and file.target.latency_source == "measured"
        if settings.workspace_mb is None and jetson is not None and is_measured:
            settings = replace(settings, workspace_mb=default_workspace_mb(jetson.memory_gb))  # TensorRT's own there
        return cls(
            tf32=fixed.tf32,
            ranges={name: given[name] for name in passed},
            unknown=tuple(name for name in wanted if name not in passed),
            settings=settings,
            timing_cache=(data_dir.parent / "engines" / TIMING_CACHE).is_file(),
            plugins=file.search.plugins,
        )

    def uses_tf32(self, plan: PrecisionPlan) -> bool:
        """Whether the engine of a plan was allowed TF32: that of all-FP32, the baseline, never is."""
        return self.tf32 and bool(plan.reduced_groups)

    def options(self, plan: PrecisionPlan) -> tuple[str, ...]:
        """The options of trtexec: names as of TensorRT 10.0 to 11 (samples/common/sampleOptions.cpp)."""
        options = ["--onnx=model.onnx", "--stronglyTyped"]
        if not self.uses_tf32(plan):
            options.append("--noTF32")
        for position, bound in enumerate(("min", "opt", "max") if self.ranges else ()):
            spec = (f"{name}:{'x'.join(map(str, sizes[position]))}" for name, sizes in self.ranges.items())
            options.append(f"--{bound}Shapes={','.join(spec)}")
        if self.settings.workspace_mb is not None:
            options.append(f"--memPoolSize=workspace:{self.settings.workspace_mb}")  # MiB
        if self.settings.optimization_level != TensorRtSettings().optimization_level:
            options.append(f"--builderOptimizationLevel={self.settings.optimization_level}")
        if self.timing_cache:
            options.append(f"--timingCacheFile={TIMING_CACHE}")
        options += [f"--staticPlugins={path}" for path in self.plugins]
        options += [f"--dynamicPlugins={path}" for path in self.plugins if exports_creators(Path(path))]
        # Never the engine that was measured, never that of another plan.
        return (*options, f"--saveEngine=model.{plan.fingerprint}.engine")

    def command(self, plan: PrecisionPlan) -> str:
        """The whole command as one line, which is pasted into a shell."""
        return printable(shlex.join(("trtexec", *self.options(plan))))

    def script(self, plan: PrecisionPlan) -> str:
        """``build.sh``: runs the command in its own directory; more options of trtexec may follow."""
        about_tf32 = "FP32 groups may use TF32" if self.uses_tf32(plan) else "TF32 is off"
        lines = [
            "# Builds the engine of model.onnx with TensorRT, on the device that will run it. Written by mptune.",
            f"# {about_tf32}, as in the search. Options that are given to this script go to trtexec after these.",
        ]
        lines += [f"# {line}" for line in self.warnings]
        return trtexec_script(lines, self.options(plan))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the command does not hold, one line each."""
        return tuple(
            f"Input {printable(name)!r} is not in the command, and trtexec takes 1 for all its sizes or values: they"
            " are not known, or its name has ' or , or a control character in it. Give --minShapes, --optShapes and"
            " --maxShapes, or rename it."
            for name in self.unknown
        )


def trtexec_script(first_lines: Iterable[str], options: Iterable[str]) -> str:
    """A shell script that runs trtexec with these options, and its own arguments, in its own directory."""
    missing = f"error: trtexec was not found\nhint: {NO_TRTEXEC}"
    lines = [
        "#!/bin/sh",
        *first_lines,
        "set -eu",
        'cd -- "$(dirname -- "$0")"',
        f"trtexec=$(command -v trtexec || echo {TRTEXEC_OF_PACKAGE})",
        f'[ -x "$trtexec" ] || {{ echo {shlex.quote(missing)} >&2; exit 127; }}',
        " \\\n    ".join(('exec "$trtexec"', *map(shlex.quote, options))) + ' "$@"',
    ]
    return "\n".join(lines) + "\n"


_SEPARATORS = frozenset(",'")
"""What trtexec takes as separators or drops: it splits lists at each comma, quoted or not, then strips the quotes
(``splitToStringVec``, ``splitNameAndValue`` in samples/common, the same in TensorRT 10.0 to 11.1)."""


def _observed(data_dir: Path, dynamic: Sequence[str], deciding: Sequence[str]) -> dict[str, Range]:
    """The range over all samples, as engines are built for; tuned for the first sample."""
    files = (data_dir / "search.npz", data_dir / "held_out.npz")
    try:
        shapes = [sample for path in files for sample in read_sample_shapes(path)] if dynamic else []
        arrays = [sample for path in files for sample in read_samples(path)] if deciding else []
    except DataError:
        return {}
    rows = {name: [sample[name] for sample in shapes if name in sample] for name in dynamic}
    rows |= {name: [tuple(sample[name].ravel().tolist()) for sample in arrays if name in sample] for name in deciding}
    ranges: dict[str, Range] = {}
    for name, of_samples in rows.items():
        if of_samples and len({len(row) for row in of_samples}) == 1:
            every = np.array(of_samples, dtype=np.int64).reshape(len(of_samples), -1)
            smallest, largest = every.min(axis=0).tolist(), every.max(axis=0).tolist()
            ranges[name] = (tuple(smallest), of_samples[0], tuple(largest))
    return ranges


def write_weak_folder(
    plan: PrecisionPlan, grouped: GroupedModel, directory: Path, recipe: BuildRecipe, *, force: bool = False
) -> None:
    """Write the folder; with ``force`` into one that exists, where other files stay.

    Raises:
        RunError: there is such a folder already, or it cannot be written.
        ModelError: the model has something that TensorRT 8 lacks.
        PlanError: the plan has groups in BF16, or more layers than a command takes.
    """
    if directory.exists() and not force:
        raise RunError(f"{directory} exists already", "give --force to write into it, or another folder with --out")
    weak = weak_model(grouped, plan)
    script = _weak_script(plan, weak, recipe)
    weak.write(directory / "model.onnx")
    check_written(directory / "model.onnx", f"the model of plan {plan.fingerprint}", grouped.model.path)
    write_text(directory / "build.sh", script, mode=0o755)
    readme = fill_template("weak.txt.jinja", plan=plan.fingerprint, model=grouped.model.path.name)
    write_text(directory / "README.txt", readme)


def _weak_script(plan: PrecisionPlan, weak: WeakModel, recipe: BuildRecipe) -> str:
    """``build.sh``. Options as of TensorRT 8.4 to 8.6 (samples/common/sampleOptions.cpp), which take exact names."""
    given = replace(recipe, timing_cache=False, plugins=()).options(plan)
    unknown = "--stronglyTyped", "--builderOptimizationLevel", "--saveEngine"
    options = [option for option in given if not option.startswith(unknown)]
    if Precision.FP16 in weak.precisions.values():
        options += ["--fp16", "--precisionConstraints=obey"]
    for option, kinds in (("--layerPrecisions", weak.precisions), ("--layerOutputTypes", weak.types)):
        options.append(f"{option}={','.join(f'{name}:{kind}' for name, kind in kinds.items())}")
    named, nodes = len(weak.precisions), len(weak.proto.graph.node)
    if max(map(len, options)) > _LONGEST_ARGUMENT:
        message = f"the precisions of {named} layers are more than one argument of a command may hold on Linux"
        raise PlanError(message, "simplify the model, or update to JetPack 6.1 (TensorRT 10.3) or later")
    options += ["--profilingVerbosity=detailed", "--exportLayerInfo=layers.json", "--saveEngine=model.engine"]
    lines = [
        f"# Builds the engine of plan {plan.fingerprint} with TensorRT 8, on the device that will run it. By mptune.",
        "# Options that are given to this script go to trtexec after these.",
        *(f"# {line}" for line in recipe.warnings),
        f"echo '{named} of {nodes} nodes have a precision, {nodes - named} cannot be named or take none'",
    ]
    return trtexec_script(lines, options)
