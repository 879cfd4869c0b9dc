"""Plans on a TensorRT without strong typing: the precision of each layer, and the check of the engine that comes out.

The code is that of the exported scripts (``mptune export --for``), which run without mptune.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.tensorrt.library import Library, collector_paused
from mptune.resources import read_template

Told = Mapping[str, Any]
"""``WeakModel.document``."""

FUSED = (
    "TensorRT does not show the types inside fused regions: there only what comes out of them is checked against the"
    " plan"
)


@cache
def _scripts(trt: Any) -> Any:
    """build.py on this module ``tensorrt``; its ``constraints`` is constraints.py."""
    constraints, build = ModuleType("constraints"), ModuleType("build")
    vars(build)["constraints"] = constraints
    for module in (constraints, build):
        vars(module).update(__file__=__file__, trt=trt)
        text = read_template(f"weak/{module.__name__}.py.in")
        for name in ("tensorrt as trt", "constraints"):
            text = text.replace(f"\nimport {name}\n", "\n")
        exec(compile(text, f"{module.__name__}.py", "exec"), vars(module))
    return build


class LayerPrecisions:
    """One way to tell a plan to the layers; where no engine is built in it, ``next`` is a looser one."""

    def __init__(self, library: Library, told: Told, attempt: int = 0) -> None:
        self._library, self._told, self._attempt = library, told, attempt
        self._scripts = _scripts(library.trt)
        self._flag, self._is_shuffle_free, self._words = self._scripts.ATTEMPTS[attempt]
        self._outcome: Any = None

    @property
    def next(self) -> LayerPrecisions | None:
        """A looser one; None after the last."""
        later = self._attempt + 1
        return LayerPrecisions(self._library, self._told, later) if later < len(self._scripts.ATTEMPTS) else None

    def tell(self, network: Any, config: Any) -> None:
        """Give each layer its precision."""
        trt = self._library.trt
        config.set_flag(getattr(trt.BuilderFlag, self._flag))
        if self._told["fp16"]:
            config.set_flag(trt.BuilderFlag.FP16)
        self._outcome = self._scripts.constraints.constrain(network, self._told, self._is_shuffle_free)

    @collector_paused()
    def check(self, memory: Any, log: Any, usual: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
        """Hold an engine against the plan, at these shapes of its dynamic inputs. Returns warnings.

        Raises:
            EngineError: it is not what the plan says, or nothing shows that it is.
        """
        build, told, outcome = self._scripts, self._told, self._outcome
        try:
            layers = build.inspect(memory, log, usual)
        except SystemExit as end:
            raise EngineError(FailureKind.ERROR, str(end.code)) from end
        checked, unseen, wrong = build.verify(layers, told, outcome)
        problems = [text[10:] for text in build.problems_of(checked, wrong, outcome, told)]
        if problems:
            more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
            raise EngineError(FailureKind.ERROR, f"the engine is not what the plan says: {problems[0]}{more}")
        warnings = (f"TensorRT built no engine with all precisions obeyed: {self._words}",) if self._attempt else ()
        return (*warnings, FUSED) if unseen else warnings
