"""Every setting, declared once: its type, default, help, option, and whether it may change when a run is resumed.

The options of ``mptune search``, the sections of run.json and the docstring of ``mptune.search`` are made from it; the
reference page begins with its words. Units stand in the names.
"""

from __future__ import annotations

import numbers
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from mptune.errors import SettingsError
from mptune.finding import OutputColumns

__all__ = ["DataSettings", "LatencySettings", "SearchSettings", "ShapeRange", "TensorRtSettings", "WorkerSettings"]

Granularity = Literal["op", "fusion", "block", "auto"]
"""How coarse groups are, the finest first; ``auto`` is ``fusion`` but for very many groups or a large budget."""

EngineChoice: TypeAlias = str
"""The name of a backend; ``auto`` is the first that measures on the target."""

MODEL, ERROR, CHOICE, BUDGET = "Model, data and target", "Error", "Choice among the plans", "Budget"
RUN, ADVANCED, PYTHON = "Run directory", "Advanced", ""
"""Headings of ``mptune search --help-all``; ``PYTHON`` are settings without an option."""

Resume = Literal["fixed", "free"]

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Declaration:
    """What is declared of a setting beside its type.

    ``resume`` says whether it is fixed within a run, or free to change from one search to the next; None where run.json
    has it in another form (a hash, the choice), or not at all.
    """

    default: Any
    panel: str
    help: str
    metavar: str | None
    resume: Resume | None
    python: str = ""  # what a Python program may give beyond the option
    option: str = ""  # its name on the command line, where that is not the field's


def _setting(resume: Resume | None, default: T, panel: str, text: str, metavar: str | None = None, **more: str) -> T:
    """A field with its default and its ``Declaration``."""
    declared = Declaration(default, panel, text, metavar, resume, **more)
    setting: T = field(default=default, metadata={"declared": declared})
    return setting


_fixed, _free, _apart = partial(_setting, "fixed"), partial(_setting, "free"), partial(_setting, None)


def declarations(settings: Any) -> dict[str, Declaration]:
    """Those of settings and of the settings nested in them, by field, in their order."""
    declared: dict[str, Declaration] = {}
    for each in fields(settings):
        if "declared" in each.metadata:
            declared[each.name] = each.metadata["declared"]
        if is_dataclass(each.default):
            declared |= declarations(each.default)
    return declared


@cache
def option_name(setting: str) -> str:
    """What the command line calls a setting, or an argument of a Python function."""
    declared = declarations(SearchSettings).get(setting)
    return (declared and declared.option) or f"--{setting.strip('_').replace('_', '-')}"


def documented(function: Function) -> Function:
    """Put what is declared of a function's arguments into its docstring, in place of ``{settings}``.

    An argument that the docstring describes itself is left to it.
    """
    wrap = textwrap.TextWrapper(120, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
    text = function.__doc__ or ""
    lines = [
        wrap.fill(f"{name}: {each.help} {each.python}")
        for name, each in declarations(SearchSettings).items()
        if name in function.__annotations__ and f"        {name}: " not in text
    ]
    function.__doc__ = text.replace("        {settings}", "\n".join(lines))
    return function


@dataclass(frozen=True)
class LatencySettings:
    """How one latency is taken (trtexec's GPU compute time; see ``mptune.engines.latency``).

    Attributes:
        warmup_ms: untimed executions, back to back, before the first timed one, at least this long.
        duration_ms: timed executions of the baseline go on for at least this long, unless fewer values are enough
            (``mptune.engines.spread``).
        min_iterations: timed executions of each engine, at least (trtexec's ``--iterations``).
        max_cv: a coefficient of variation above this is a warning.
        cuda_graph: replay a captured CUDA graph where capture works.
    """

    warmup_ms: float = 100.0
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
    """The largest error of an output, or of columns of it, that a plan may have."""

    output: str
    columns: tuple[int, ...] | None  # 0-based; None means all of it
    limit: float  # in the metric's unit, or in the output's own
    is_absolute: bool = False  # the limit is one of the largest absolute error

    @classmethod
    def parse(cls, text: str) -> Tolerance:
        """Read ``OUTPUT=X``, ``OUTPUT[4]=X``, ``OUTPUT[0:4]=X`` or ``OUTPUT[0,2,5]=X``; X may begin with ``abs:``.

        The name ends at the last ``[`` or the last ``=``; ``0:4`` leaves column 4 out.
        """

        def refuse(reason: str) -> SettingsError:
            return SettingsError(f"{text}{reason}", _TOLERANCE_HINT, setting="tolerance")

        name, equals, value = text.rpartition("=")
        columns: dict[int, None] | None = None
        if name.endswith("]"):
            name, _, inside = name[:-1].rpartition("[")
            columns = {}
            for part in inside.split(","):
                match = re.fullmatch(r"\s*(\d{1,7})\s*(?::\s*(\d{1,7})\s*)?", part)
                start, end = (0, 0) if match is None else (int(match[1]), int(match[2] or int(match[1]) + 1))
                if not start < end <= _MOST_COLUMNS:
                    raise refuse(f": [{inside}] names no columns")
                columns |= dict.fromkeys(range(start, end))
        if not equals or not name:
            raise refuse(" is not understood")
        number = value.removeprefix("abs:")
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if not 0 < limit < float("inf"):
            raise refuse(f": {number!r} is not a number above 0")
        return cls(name, None if columns is None else tuple(columns), limit, value.startswith("abs:"))

    @classmethod
    def parse_all(cls, given: Tolerances | None) -> tuple[Tolerance, ...]:
        """Read several, in any form that a caller may give them in."""
        if isinstance(given, (str, Tolerance)):
            given = (given,)
        elif isinstance(given, Mapping):
            given = [f"{output}={limit}" for output, limit in given.items()]
        return tuple(each if isinstance(each, Tolerance) else cls.parse(each) for each in given or ())

    def __str__(self) -> str:
        limit = f"{self.limit:g}" if float(f"{self.limit:g}") == self.limit else repr(self.limit)
        return f"{OutputColumns(self.output, self.columns)}={'abs:' if self.is_absolute else ''}{limit}"


Tolerances: TypeAlias = "str | Tolerance | Sequence[str | Tolerance] | Mapping[str, float | str]"
"""Tolerances as a caller gives them: one or several, or output, with columns or without -> X or ``abs:X``."""

_TOLERANCE_HINT = "write OUTPUT=X, OUTPUT[4]=X, OUTPUT[0:4]=X or OUTPUT[0,2,5]=X, with abs:X for the absolute error"
_MOST_COLUMNS = 1 << 20


def one_or_several(given: Any) -> tuple[Any, ...]:
    """Several values, where a caller may give one by itself, or None."""
    if given is None or isinstance(given, (str, os.PathLike)) or not isinstance(given, Iterable):
        return () if given is None else (given,)
    return tuple(given)


def read_error(given: float | str | None) -> float | None:
    """The limit on an error, of a number or of a text such as ``1e-2`` or ``1%``."""
    if not isinstance(given, str):
        return given
    number = given.strip().removesuffix("%")
    try:
        return float(number) / (100.0 if given.strip().endswith("%") else 1.0)
    except ValueError:
        raise SettingsError(f"{given} is not a number", "write 1e-2, 0.01 or 1%", setting="max_error") from None


def check_io(io: str) -> None:
    """Check a type of inputs and outputs.

    Raises:
        SettingsError: it is none that mixed models can have there.
    """
    if io not in ("fp32", "fp16"):
        raise SettingsError(f"is {io}", "give fp32 or fp16", setting="io")


def check_limits(max_error: float | None, max_latency_ms: float | None, max_memory_bytes: int | None = None) -> None:
    """Refuse limits that no plan can be asked to meet."""
    limits = {"max_error": max_error, "max_latency_ms": max_latency_ms, "max_memory_bytes": max_memory_bytes}
    for setting, limit in limits.items():
        _check(setting, limit, "give a number above 0")


def _check(setting: str, value: object, hint: str, *, least: int | None = None) -> None:
    """Refuse what is not a number above 0; with ``least``: not a whole number from there on."""
    if value is None:
        return
    kind, what = (numbers.Real, "a number") if least is None else (numbers.Integral, "a whole number")
    if not isinstance(value, kind):
        raise SettingsError(f"is {value!r}, not {what}", hint, setting=setting)
    if not float(value) > 0 if least is None else int(value) < least:  # type: ignore[call-overload]
        raise SettingsError(f"is {float(value):g}", hint, setting=setting)


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

    workspace_mb: int | None = _apart(
        None,
        ADVANCED,
        "Limit on the scratch memory of a TensorRT kernel, such as 2GiB. Default: all memory of a GPU, a"
        " quarter of a Jetson's.",
        "SIZE",
        option="--workspace",
    )
    optimization_level: int = 3
    timing_cache: bool = True

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        _check("workspace_mb", self.workspace_mb, "give at least 1 MiB, or no limit", least=1)
        if not 0 <= self.optimization_level <= 5:
            raise SettingsError(f"the optimization level is {self.optimization_level}", "give 0 to 5; 3 is the default")


@dataclass(frozen=True)
class DataSettings:
    """How calibration samples are drawn and split."""

    batch: int = _fixed(1, MODEL, "Rows per sample if the batch is dynamic.", "N")
    random_samples: int = _fixed(16, PYTHON, "Samples that are drawn where no data is given.")
    held_out_fraction: float = _fixed(0.25, PYTHON, "Share of samples that the search never sees.")
    max_search_samples: int | None = _fixed(64, PYTHON, "At most this many search samples; None takes all.")

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        _check("batch", self.batch, "give at least 1", least=1)


@dataclass(frozen=True, eq=False)
class InMemory:
    """Calibration data that the caller holds in memory, in place of a path (``mptune.data.arrays``)."""

    content: Any = field(repr=False)  # an array, a mapping of arrays, or a sequence with one mapping per sample

    def __str__(self) -> str:
        return "arrays"


@dataclass(frozen=True)
class SearchSettings:
    """What one `mptune search` does. The same settings on the same run directory resume it.

    A setting is declared here alone; it is an argument of ``mptune.search``, too.

    Attributes:
        reported_metrics: further metrics that are taken of every plan and reported.
        rollout: what ``feedback`` and ``steps`` come to for the model.
        metric_function: computes a metric that the caller gave as a function; called in this process.
    """

    data: Path | InMemory | None = _free(
        None,
        MODEL,
        "Calibration samples: .npz, .npy, or a folder. Default: random inputs.",
        "PATH",
        python="Or an array, for a model with one input; a dictionary of arrays by input name, samples concatenated"
        " along axis 0; or an iterable with one dictionary per sample.",
    )
    data_settings: DataSettings = _apart(
        DataSettings(), PYTHON, "How samples are drawn and split; ``batch`` above 1 replaces the one in here."
    )
    shapes: tuple[ShapeRange, ...] = _fixed(
        (),
        MODEL,
        "Shapes that a TensorRT engine accepts, such as x:1x32,4x32,8x32; once for each dynamic input."
        " Default: the shapes of the data.",
        "NAME:MIN,OPT,MAX",
        python="Or input -> one shape, or (smallest, usual, largest).",
    )
    target: str = _fixed(
        "auto", MODEL, "Device to tune for; auto is the GPU here. `mptune targets` lists the names.", "auto|NAME|FILE"
    )
    engine: EngineChoice = _fixed(
        "auto", MODEL, "What builds and runs the engines.", "<auto|tensorrt|tensorrt-rtx|onnxruntime>"
    )
    plugins: tuple[Path, ...] = _free(
        (),
        MODEL,
        "Library with TensorRT plugins (.so) that building and running the engines needs. It is loaded in the worker"
        " processes. Repeatable.",
        "FILE.so",
        option="--plugin",
    )
    space: str = _fixed(
        "default",
        MODEL,
        "Which groups may be FP16, and which plans to try first; `mptune spaces` lists the names.",
        "NAME|FILE",
    )
    precisions: tuple[str, ...] = _fixed(
        ("fp32", "fp16"),
        MODEL,
        "Precisions that groups may have: fp32,fp16 or fp32,bf16 or fp32,fp16,bf16. With all three, groups"
        " whose values leave FP16's range may be BF16.",
        "LIST",
    )
    io: str = _fixed(
        "fp32",
        MODEL,
        "Type of FP32 inputs and outputs in mixed models: fp32 keeps it, fp16 makes them FP16 (keep_io_types=False).",
        "fp32|fp16",
    )
    opset: int | None = _fixed(
        None, MODEL, "Raise the model to this opset first: most operators have BF16 from 22 on.", "N"
    )
    metric: str = _free(
        "worst_part",
        ERROR,
        "The error to minimise: a named metric, or a function of your own. Repeatable: the first is optimised, the"
        " others are reported. Default: worst_part.",
        "NAME|script.py:function[:max]",
        python="Or a function (outputs, reference) -> float, called once per sample with two dictionaries of arrays by"
        " output name; or (outputs, references, inputs, labels) -> float, called once with all samples. The run keeps a"
        " hash of a function: give it again to resume.",
    )
    reported_metrics: tuple[str, ...] = _free((), PYTHON, "Metrics reported of every plan.")
    labels: Path | None = _apart(
        None, ERROR, "Labels for metrics that need them: .npz, rows in the order of the data.", "PATH"
    )
    tolerance: tuple[Tolerance, ...] = _free(
        (),
        ERROR,
        "Limit the error of an output, or of columns of it (4, 0:4 or 0,2,5), in the metric's unit; abs:X"
        " limits the absolute error. Repeatable.",
        "OUTPUT[COLUMNS]=X",
        python='Or output -> X, such as {"scores": 1e-3, "detections[4]": "abs:0.005"}.',
    )
    ignore: tuple[str, ...] = _free((), ERROR, "Leave out the error of this output. Repeatable.", "OUTPUT")
    feedback: tuple[str, ...] = _fixed(
        (),
        ERROR,
        "Feed OUTPUT back as INPUT over recorded sequences; the error at the end of a sequence counts.",
        "OUTPUT:INPUT",
    )
    steps: int | None = _fixed(
        None, ERROR, "Number of samples in one recorded sequence, for --feedback. Default: all.", "K"
    )
    max_error: float | None = _free(
        None,
        CHOICE,
        "Choose the fastest plan whose error is at most this, such as 1e-2 or 1%. Default: 1% for worst_part.",
        "X",
    )
    max_latency_ms: float | None = _free(
        None, CHOICE, "Choose the plan with the smallest error whose latency is at most this, in ms.", "X"
    )
    max_memory_bytes: int | None = _free(
        None,
        CHOICE,
        "Choose among plans whose engine and its context take at most this, such as 2GiB.",
        "SIZE",
        option="--max-memory",
    )
    limits: tuple[str, ...] = _apart(
        (),
        CHOICE,
        "Limit the value of a metric, on search and on held-out samples, such as map>=0.41. Repeatable.",
        "NAME>=X",
        option="--limit",
    )
    knee: bool = _apart(False, CHOICE, "Choose the knee of the plans, in place of the fastest within a limit.")
    budget: int = _free(
        50, BUDGET, "Number of plans to evaluate, those of common rules included. Default: 50, or that of the run.", "N"
    )
    timeout_s: float | None = _free(
        None,
        BUDGET,
        "Start no new evaluation after this time: 8h, 90m, 30s or seconds. Default: no limit.",
        "8h",
        option="--timeout",
    )
    max_disk_bytes: int | None = _free(
        None,
        BUDGET,
        "Start no new evaluation once the run directory is this large. Default: no limit.",
        "20GiB",
        option="--max-disk",
    )
    gpus: tuple[int, ...] = _apart(
        (), BUDGET, "Share the search among these GPUs, one worker process each. Default: one GPU.", "0,1"
    )
    out: Path | None = _apart(
        None, RUN, "Run directory. Default: the model's name + .mptune, in the working directory.", "DIR"
    )
    fresh: bool = _apart(False, RUN, "Start a new search; the old run directory is moved aside.")
    storage: str | None = _apart(
        None,
        RUN,
        "Optuna storage, to share the search. Default: $MPTUNE_STORAGE, else a file in the run directory.",
        "URL",
    )
    sampler: str = _free(
        "precision",
        ADVANCED,
        "What proposes plans: precision models error and latency group by group, tpe is Optuna's TPESampler.",
        "precision|tpe",
    )
    seed: int = _fixed(0, ADVANCED, "Seed of the data split, the sampler and random inputs.", "N")
    tf32: bool = _fixed(False, ADVANCED, "Allow TF32 in the FP32 groups of candidates. The reference never uses it.")
    tensorrt: TensorRtSettings = _fixed(TensorRtSettings(), PYTHON, "How TensorRT builds engines.")
    skip_checks: bool = _free(
        False, ADVANCED, "Search even if a check finds the FP32 model, its data or its engine wrong."
    )
    confirm_rounds: int = _free(
        3,
        PYTHON,
        "Fresh processes in which the chosen plan, and points whose place is in doubt, are measured again; the other"
        " points of the front are in one.",
    )
    confirm_points: int = _free(
        12,
        PYTHON,
        "How many points of a longer front are measured again; baselines, both ends and what may be chosen always are.",
    )
    latency: LatencySettings = _fixed(LatencySettings(), PYTHON, "How latencies are taken.")
    worker: WorkerSettings = _apart(
        WorkerSettings(), PYTHON, "Deadlines of the worker process that builds and measures."
    )
    rollout: Any = field(default=None, repr=False)
    metric_function: Callable[[Mapping[str, Any], Mapping[str, Any]], float] | None = field(
        default=None, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Read the limit on the error, and refuse values that cannot be meant."""
        object.__setattr__(self, "max_error", read_error(self.max_error))
        _check("budget", self.budget, "give at least 1; 50 is the default", least=1)
        _check("seed", self.seed, "give 0 or a positive integer", least=0)
        _check("steps", self.steps, "give at least 1", least=1)
        _check("opset", self.opset, "give a whole number", least=1)
        check_io(self.io)
        _check("timeout_s", self.timeout_s, "give a duration above 0")
        _check("max_disk_bytes", self.max_disk_bytes, "give a size above 0, such as 20GiB")
        check_limits(self.max_error, self.max_latency_ms, self.max_memory_bytes)
        if not all(isinstance(gpu, int) and gpu >= 0 for gpu in self.gpus) or len(set(self.gpus)) < len(self.gpus):
            shown = ",".join(map(str, self.gpus))
            raise SettingsError(f"is {shown}", "give numbers as `nvidia-smi -L` counts, each once", setting="gpus")
        names = [given.name for given in self.shapes]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise SettingsError(f"names input {twice!r} twice", "give each input once", setting="shapes")
