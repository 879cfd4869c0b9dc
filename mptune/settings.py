"""Every setting and its default, in one place. Units stand in the names."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from mptune.errors import SettingsError
from mptune.finding import OutputColumns

Granularity = Literal["op", "fusion", "block", "auto"]
"""How coarse groups are, the finest first; ``auto`` is ``fusion`` but for very many groups or a large budget."""

EngineChoice: TypeAlias = str
"""The name of a backend; ``auto`` is the first that measures on the target."""

ENGINES = "<auto|tensorrt|tensorrt-rtx|onnxruntime>"
"""Those that mptune brings."""

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """How the command line shows a setting."""

    name: str
    panel: str
    help: str
    metavar: str | None = None


MODEL, ERROR, CHOICE, BUDGET = "Model, data and target", "Error", "Choice among the plans", "Budget"
RUN, ADVANCED = "Run directory", "Advanced"


def _option(default: T, panel: str, help: str, metavar: str | None = None) -> T:
    """A setting's default and what the command line shows of it."""
    setting: T = field(default=default, metadata={"option": (panel, help, metavar)})
    return setting


_OPTION_NAMES = {
    "timeout_s": "--timeout",
    "max_disk_bytes": "--max-disk",
    "max_memory_bytes": "--max-memory",
    "workspace_mb": "--workspace",
    "limits": "--limit",
    "plugins": "--plugin",
    "wait_s": "--wait",
    "for_": "--for",
}
"""Setting -> option, where these differ: the unit stands in the value, and what is repeated is in the singular."""


def option_name(setting: str) -> str:
    """What the command line calls a setting, or an argument of a Python function."""
    return _OPTION_NAMES.get(setting, f"--{setting.replace('_', '-')}")


def options_of(settings: Any) -> dict[str, Option]:
    """The options of settings and of those nested in them: field -> its option, in their order."""
    options: dict[str, Option] = {}
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        if is_dataclass(value):
            options |= options_of(value)
        elif "option" in setting.metadata:
            options[setting.name] = Option(option_name(setting.name), *setting.metadata["option"])
    return options


@dataclass(frozen=True)
class LatencySettings:
    """How one latency is taken (trtexec's GPU compute time; see ``mptune.engines.timing.latency``).

    Attributes:
        warmup_ms: untimed executions before the first timed one, at least this long.
        duration_ms: timed executions of the baseline go on for at least this long, unless fewer values are enough
            (``mptune.engines.timing.spread``).
        min_iterations: timed executions of each engine, at least (trtexec's ``--iterations``).
        max_cv: a coefficient of variation above this is a warning.
        cuda_graph: replay a captured CUDA graph where capture works.
    """

    warmup_ms: float = 200.0
    duration_ms: float = 400.0
    min_iterations: int = 10
    max_cv: float = 0.025
    cuda_graph: bool = True


@dataclass(frozen=True)
class WorkerSettings:
    """Deadlines that the parent enforces on the worker process.

    Attributes:
        build_timeout_s: one build of one engine.
        measure_timeout_s: loading, running and timing one engine over all search samples.
        start_timeout_s: a fresh worker until it answers.
        max_jobs: a worker is replaced after this many jobs, so that leaks cannot add up; None never.
        metric_timeout_s: one call of a script's metric.
        retries: how often the worker of a GPU that died is started again.
    """

    build_timeout_s: float = 1800.0
    measure_timeout_s: float = 600.0
    start_timeout_s: float = 120.0
    max_jobs: int | None = 1000
    metric_timeout_s: float = 300.0
    retries: int = 4


@dataclass(frozen=True)
class ShapeRange:
    """The shapes of one dynamic input that an engine is built for: an optimization profile's, in TensorRT's words.

    Attributes:
        name: of the input.
        smallest: every dimension's smallest size.
        usual: the shape that the engine is tuned for.
        largest: every dimension's largest size.
    """

    name: str
    smallest: tuple[int, ...]
    usual: tuple[int, ...]
    largest: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse ranks that differ, and sizes that are not in ascending order."""
        if not len(self.smallest) == len(self.usual) == len(self.largest):
            raise SettingsError(f"{self.name}: the three shapes differ in rank", _SHAPES_HINT, setting="shapes")
        if not all(0 <= a <= b <= c for a, b, c in zip(self.smallest, self.usual, self.largest, strict=True)):
            raise SettingsError(f"{self.name}: the shapes are not in ascending order", _SHAPES_HINT, setting="shapes")

    @classmethod
    def parse(cls, text: str) -> ShapeRange:
        """Read ``name:1x3x224x224,4x3x224x224,8x3x224x224``, or ``name:8x3x224x224`` for one shape."""
        name, _, shapes = text.rpartition(":")
        parts = shapes.split(",")
        if not name or len(parts) not in (1, 3) or not all(re.fullmatch(r"\d+(x\d+)*", part) for part in parts):
            raise SettingsError(f"{text} is not understood", _SHAPES_HINT, setting="shapes")
        smallest, usual, largest = (tuple(int(size) for size in part.split("x")) for part in (parts * 3)[:3])
        return cls(name, smallest, usual, largest)

    def __str__(self) -> str:
        """As ``parse`` reads it."""
        shapes = ["x".join(map(str, shape)) for shape in (self.smallest, self.usual, self.largest)]
        return f"{self.name}:{shapes[0] if len(set(shapes)) == 1 else ','.join(shapes)}"


_SHAPES_HINT = "write NAME:SMALLEST,USUAL,LARGEST, such as x:1x3x224x224,4x3x224x224,8x3x224x224"


@dataclass(frozen=True)
class Tolerance:
    """The largest error of an output, or of some of its columns, that a plan may have.

    Attributes:
        columns: 0-based; None means all of it.
        limit: in the metric's unit, or in the output's own.
        is_absolute: the limit is one of the largest absolute error.
    """

    output: str
    columns: tuple[int, ...] | None
    limit: float
    is_absolute: bool = False

    @classmethod
    def parse(cls, text: str) -> Tolerance:
        """Read ``OUTPUT=X``, ``OUTPUT[4]=X``, ``OUTPUT[0:4]=X`` or ``OUTPUT[0,2,5]=X``; X may begin with ``abs:``.

        The name ends at the last ``[`` or the last ``=``; ``0:4`` leaves column 4 out.
        """
        where, equals, value = text.rpartition("=")
        name, columns = where, None
        if where.endswith("]"):
            name, _, inside = where[:-1].rpartition("[")
            columns = _columns(inside, text)
        number = value.removeprefix("abs:")
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if not equals or not name:
            raise SettingsError(f"{text} is not understood", _TOLERANCE_HINT, setting="tolerance")
        if not 0 < limit < float("inf"):
            raise SettingsError(f"{text}: {number!r} is not a number above 0", _TOLERANCE_HINT, setting="tolerance")
        return cls(name, columns, limit, value.startswith("abs:"))

    @classmethod
    def parse_all(cls, given: Tolerances) -> tuple[Tolerance, ...]:
        """Read several, in any form that a caller may give them in."""
        if isinstance(given, (str, Tolerance)):
            given = (given,)
        elif isinstance(given, Mapping):
            given = [f"{output}={limit}" for output, limit in given.items()]
        return tuple(tolerance if isinstance(tolerance, Tolerance) else cls.parse(tolerance) for tolerance in given)

    def __str__(self) -> str:
        limit = f"{self.limit:g}" if float(f"{self.limit:g}") == self.limit else repr(self.limit)
        return f"{OutputColumns(self.output, self.columns)}={'abs:' if self.is_absolute else ''}{limit}"


Tolerances: TypeAlias = "str | Tolerance | Sequence[str | Tolerance] | Mapping[str, float | str]"
"""Tolerances as a caller gives them: one or several, or output, with columns or without -> X or ``abs:X``."""

_TOLERANCE_HINT = "write OUTPUT=X, OUTPUT[4]=X, OUTPUT[0:4]=X or OUTPUT[0,2,5]=X, with abs:X for the absolute error"

_MOST_COLUMNS = 1 << 20


def _columns(inside: str, text: str) -> tuple[int, ...]:
    """The columns between the brackets of a tolerance."""
    columns: list[int] = []
    for part in inside.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})\s*(?::\s*(\d{1,7})\s*)?", part)
        start, end = (0, 0) if match is None else (int(match[1]), int(match[2] or int(match[1]) + 1))
        if not start < end <= _MOST_COLUMNS:
            raise SettingsError(f"{text}: [{inside}] names no columns", _TOLERANCE_HINT, setting="tolerance")
        columns += range(start, end)
    return tuple(dict.fromkeys(columns))


@dataclass(frozen=True)
class TensorRtSettings:
    """How TensorRT and TensorRT-RTX build engines.

    Attributes:
        workspace_mb: most scratch memory that a kernel may take, MiB; None leaves it to TensorRT (all of the device's),
            or takes a quarter where CPU and GPU share their memory (``default_workspace_mb``).
        optimization_level: TensorRT's builder optimization level, 0 (fast builds) to 5 (most tactics tried).
        timing_cache: share what TensorRT measured of its tactics among the builds of a run, which makes them faster
            and more alike; TensorRT-RTX measures nothing at build time and has none.
    """

    workspace_mb: int | None = _option(
        None,
        ADVANCED,
        "Limit on the scratch memory of a TensorRT kernel, such as 2GiB. Default: all memory of a GPU, a"
        " quarter of a Jetson's.",
        "SIZE",
    )
    optimization_level: int = 3
    timing_cache: bool = True

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        if self.workspace_mb is not None and self.workspace_mb < 1:
            raise SettingsError(
                f"is {self.workspace_mb} MiB", "give at least 1 MiB, or no limit", setting="workspace_mb"
            )
        if not 0 <= self.optimization_level <= 5:
            raise SettingsError(f"the optimization level is {self.optimization_level}", "give 0 to 5; 3 is the default")


@dataclass(frozen=True)
class DataSettings:
    """How calibration samples are drawn and split.

    Attributes:
        batch: rows per sample for a model with a dynamic batch.
        random_samples: how many samples are drawn when the user gave no data.
        held_out_fraction: share of the samples that the search never sees.
        max_search_samples: at most this many search samples are evaluated per plan; None takes all.
    """

    batch: int = _option(1, MODEL, "Rows per sample if the batch is dynamic.", "N")
    random_samples: int = 16
    held_out_fraction: float = 0.25
    max_search_samples: int | None = 64

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        _check_whole("batch", self.batch)
        if self.batch < 1:
            raise SettingsError(f"is {self.batch}", "give at least 1", setting="batch")


def check_limits(max_error: float | None, max_latency_ms: float | None, max_memory_bytes: int | None = None) -> None:
    """Refuse limits that no plan can be asked to meet."""
    _check_positive("max_error", max_error, "give a number above 0")
    _check_positive("max_latency_ms", max_latency_ms, "give a number above 0")
    _check_positive("max_memory_bytes", max_memory_bytes, "give a number above 0")


def _check_whole(setting: str, value: object) -> None:
    if value is not None and not isinstance(value, numbers.Integral):
        raise SettingsError(f"is {value!r}, not a whole number", "give a whole number", setting=setting)


def read_error(given: float | str | None) -> float | None:
    """The limit on an error, of a number or of a text such as ``1e-2`` or ``1%``."""
    if not isinstance(given, str):
        return given
    number = given.strip().removesuffix("%")
    try:
        return float(number) / (100.0 if given.strip().endswith("%") else 1.0)
    except ValueError:
        raise SettingsError(f"{given} is not a number", "write 1e-2, 0.01 or 1%", setting="max_error") from None


def _check_positive(setting: str, value: object, hint: str) -> None:
    if value is not None and not isinstance(value, numbers.Real):
        raise SettingsError(f"is {value!r}, not a number", hint, setting=setting)
    if value is not None and not float(value) > 0:
        raise SettingsError(f"is {float(value):g}", hint, setting=setting)


@dataclass(frozen=True, eq=False)
class InMemory:
    """Calibration data that the caller holds in memory, in place of a path.

    Attributes:
        content: an array, a mapping of arrays, or a sequence with one mapping per sample
            (``mptune.data.arrays``).
    """

    content: Any = field(repr=False)

    def __str__(self) -> str:
        return "arrays"


@dataclass(frozen=True)
class SearchSettings:
    """What one `mptune search` does. The same settings on the same run directory resume it.

    A setting is declared here alone: its type, its default and its option. It is an argument of ``mptune.search``, too;
    the sections of run.json (``mptune.run_json``) say which settings may change when a run is resumed.

    Attributes:
        reported_metrics: further metrics that are taken of every plan and reported.
        rollout: what ``feedback`` and ``steps`` come to for the model.
        metric_function: computes a metric that the caller gave as a function; called in this process.
    """

    data: Path | InMemory | None = _option(
        None,
        MODEL,
        "Calibration samples: .npz, .npy, or a folder. Default: random inputs.",
        "PATH",
    )
    data_settings: DataSettings = field(default_factory=DataSettings)
    shapes: tuple[ShapeRange, ...] = _option(
        (),
        MODEL,
        "Shapes that a TensorRT engine accepts, such as x:1x32,4x32,8x32; once for each dynamic input."
        " Default: the shapes of the data.",
        "NAME:MIN,OPT,MAX",
    )
    target: str = _option(
        "auto", MODEL, "Device to tune for; auto is the GPU here. `mptune targets` lists the names.", "auto|NAME|FILE"
    )
    engine: EngineChoice = _option("auto", MODEL, "What builds and runs the engines.", ENGINES)
    plugins: tuple[Path, ...] = _option(
        (),
        MODEL,
        "Library with TensorRT plugins (.so) that building and running the engines needs. It is loaded in the worker"
        " processes. Repeatable.",
        "FILE.so",
    )
    space: str = _option(
        "default",
        MODEL,
        "Which groups may be FP16, and which plans to try first; `mptune spaces` lists the names.",
        "NAME|FILE",
    )
    precisions: tuple[str, ...] = _option(
        ("fp32", "fp16"),
        MODEL,
        "Precisions that groups may have: fp32,fp16 or fp32,bf16 or fp32,fp16,bf16. With all three, groups"
        " whose values leave FP16's range may be BF16.",
        "LIST",
    )
    opset: int | None = _option(
        None, MODEL, "Raise the model to this opset first: most operators have BF16 from 22 on.", "N"
    )
    metric: str = "worst_part"
    reported_metrics: tuple[str, ...] = ()
    labels: Path | None = _option(
        None, ERROR, "Labels for metrics that need them: .npz, rows in the order of the data.", "PATH"
    )
    tolerance: tuple[Tolerance, ...] = _option(
        (),
        ERROR,
        "Limit the error of an output, or of columns of it (4, 0:4 or 0,2,5), in the metric's unit; abs:X"
        " limits the absolute error. Repeatable.",
        "OUTPUT[COLUMNS]=X",
    )
    ignore: tuple[str, ...] = _option((), ERROR, "Leave out the error of this output. Repeatable.", "OUTPUT")
    feedback: tuple[str, ...] = _option(
        (),
        ERROR,
        "Feed OUTPUT back as INPUT over recorded sequences; the error at the end of a sequence counts.",
        "OUTPUT:INPUT",
    )
    steps: int | None = _option(
        None, ERROR, "Number of samples in one recorded sequence, for --feedback. Default: all.", "K"
    )
    max_error: float | None = _option(
        None,
        CHOICE,
        "Choose the fastest plan whose error is at most this, such as 1e-2 or 1%. Default: 1% for worst_part.",
        "X",
    )
    max_latency_ms: float | None = _option(
        None, CHOICE, "Choose the plan with the smallest error whose latency is at most this, in ms.", "X"
    )
    max_memory_bytes: int | None = _option(
        None, CHOICE, "Choose among plans whose engine and its context take at most this, such as 2GiB.", "SIZE"
    )
    limits: tuple[str, ...] = _option(
        (),
        CHOICE,
        "Limit the value of a metric, on search and on held-out samples, such as map>=0.41. Repeatable.",
        "NAME>=X",
    )
    knee: bool = _option(False, CHOICE, "Choose the knee of the plans, in place of the fastest within a limit.")
    budget: int = _option(50, BUDGET, "Number of plans to evaluate, those of common rules included.", "N")
    timeout_s: float | None = _option(
        None, BUDGET, "Start no new evaluation after this time: 8h, 90m, 30s or seconds. Default: no limit.", "8h"
    )
    max_disk_bytes: int | None = _option(
        None, BUDGET, "Start no new evaluation once the run directory is this large. Default: no limit.", "20GiB"
    )
    gpus: tuple[int, ...] = _option(
        (), BUDGET, "Share the search among these GPUs, one worker process each. Default: one GPU.", "0,1"
    )
    out: Path | None = _option(
        None, RUN, "Run directory. Default: the model's name + .mptune, in the working directory.", "DIR"
    )
    fresh: bool = _option(False, RUN, "Start a new search; the old run directory is moved aside.")
    storage: str | None = _option(
        None,
        RUN,
        "Optuna storage, to share the search. Default: $MPTUNE_STORAGE, else a file in the run directory.",
        "URL",
    )
    sampler: str = _option(
        "precision",
        ADVANCED,
        "What proposes plans: precision models error and latency group by group, tpe is Optuna's TPESampler.",
        "precision|tpe",
    )
    seed: int = _option(0, ADVANCED, "Seed of the data split, the sampler and random inputs.", "N")
    tf32: bool = _option(False, ADVANCED, "Allow TF32 in the FP32 groups of candidates. The reference never uses it.")
    tensorrt: TensorRtSettings = field(default_factory=TensorRtSettings)
    skip_checks: bool = _option(
        False, ADVANCED, "Search even if a check finds the FP32 model, its data or its engine wrong."
    )
    confirm_rounds: int = 3
    confirm_points: int = 15
    latency: LatencySettings = field(default_factory=LatencySettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    rollout: Any = field(default=None, repr=False)
    metric_function: Callable[[Mapping[str, Any], Mapping[str, Any]], float] | None = field(
        default=None, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Read the limit on the error, and refuse values that cannot be meant."""
        object.__setattr__(self, "max_error", read_error(self.max_error))
        for name in ("budget", "seed", "steps", "opset"):
            _check_whole(name, getattr(self, name))
        _check_positive("budget", self.budget, "give at least 1; 50 is the default")
        _check_positive("timeout_s", self.timeout_s, "give a duration above 0")
        _check_positive("max_disk_bytes", self.max_disk_bytes, "give a size above 0, such as 20GiB")
        check_limits(self.max_error, self.max_latency_ms, self.max_memory_bytes)
        if self.seed < 0:
            raise SettingsError(f"is {self.seed}", "give 0 or a positive integer", setting="seed")
        if not all(isinstance(gpu, int) and gpu >= 0 for gpu in self.gpus) or len(set(self.gpus)) < len(self.gpus):
            raise SettingsError(
                f"is {','.join(map(str, self.gpus))}",
                "give numbers as `nvidia-smi -L` counts, each once",
                setting="gpus",
            )
        named = [given.name for given in self.shapes]
        twice = next((name for name in named if named.count(name) > 1), None)
        if twice is not None:
            raise SettingsError(f"names input {twice!r} twice", "give each input once", setting="shapes")
