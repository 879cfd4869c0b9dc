"""mptune: which layer groups of an ONNX model can run in FP16, measured for latency and error together.

The names below are the public API. Each is imported when it is first used, so ``import mptune`` costs
milliseconds and loads neither ONNX Runtime nor Optuna nor onnx.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mptune._version import __version__

# ONNX Runtime 1.29 and later collect telemetry on Linux (names of models and graphs, the machine) unless this is
# set before they are imported. Worker processes set it, too.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_NAMES = {
    "mptune.api.searching": "search",
    "mptune.api.reading": "report pick",
    "mptune.api.models": "load_model inspect apply compare check",
    "mptune.api.deploying": "worker confirm export open_run Run",
    "mptune.settings": "SearchSettings LatencySettings WorkerSettings TensorRtSettings DataSettings ShapeRange",
    "mptune.graph.plan": "Precision PrecisionPlan",
    "mptune.graph.groups": "LayerGroup find_groups",
    "mptune.graph.loading.model": "Model",
    "mptune.graph.writing.rewrite": "rewrite",
    "mptune.tuning.evaluation": "Evaluation",
    "mptune.tuning.front": "Front front_records",
    "mptune.tuning.confirmation": "Confirmation",
    "mptune.tuning.bench": "Listener",
    "mptune.tuning.sampler.precision": "PrecisionSampler",
    "mptune.tuning.sampler.trials": "Prior",
    "mptune.inspection": "Inspection",
    "mptune.diagnosis.comparing": "Comparison",
    "mptune.errors": "MptuneError SettingsError ModelError DataError PlanError SpaceError TargetError RunError"
    " BaselineError EndedEarlyError",
}

_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:  # with `as`: type checkers in strict mode take no other import as exported
    from mptune.api.deploying import *  # noqa: F403 - its __all__
    from mptune.api.models import *  # noqa: F403
    from mptune.api.reading import pick as pick, report as report
    from mptune.api.searching import search as search
    from mptune.diagnosis.comparing import Comparison as Comparison
    from mptune.errors import *  # noqa: F403 - its __all__
    from mptune.graph.groups import LayerGroup as LayerGroup, find_groups as find_groups
    from mptune.graph.loading.model import Model as Model
    from mptune.graph.plan import Precision as Precision, PrecisionPlan as PrecisionPlan
    from mptune.graph.writing.rewrite import rewrite as rewrite
    from mptune.inspection import Inspection as Inspection
    from mptune.settings import *  # noqa: F403 - its __all__
    from mptune.tuning.bench import Listener as Listener
    from mptune.tuning.confirmation import Confirmation as Confirmation
    from mptune.tuning.evaluation import Evaluation as Evaluation
    from mptune.tuning.front import Front as Front, front_records as front_records
    from mptune.tuning.sampler.precision import PrecisionSampler as PrecisionSampler
    from mptune.tuning.sampler.trials import Prior as Prior


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'mptune' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
