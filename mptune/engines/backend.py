"""What a backend is: it says what it can do for a target here, builds an engine of each plan, and opens it.

``Backend.available`` and ``Builder.build`` run in the parent, ``Engine.open`` runs in the worker. Any job reports the
progress of a long build by ``WorkerState.report``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from mptune.engines.base import Engine, Failure, MissingKernel, Profiling
from mptune.engines.tensorrt.layers import LayerTime
from mptune.graph.facts import FusedNodes
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision, PrecisionPlan

if TYPE_CHECKING:
    from mptune.engines.toolchains.reference import ReferenceModel
    from mptune.graph.writing.rewrite import Rewriter
    from mptune.targets.detect import Gpu
    from mptune.targets.target import Target


@dataclass(frozen=True)
class Place:
    """Where engines are wanted."""

    target: Target
    gpu: Gpu | None = None
    """The target's GPU, where it is here; None for a CPU, and for a device that is elsewhere."""
    model: Model | None = None  # None where it is not known yet
    is_named: bool = False  # the user asked for this backend by its name
    plugins: tuple[Path, ...] = ()  # libraries with TensorRT plugins that the model needs


@dataclass(frozen=True)
class Availability:
    """What a backend can do for a place."""

    ability: Literal["measures", "builds", ""] = ""
    """``measures``: builds, runs and times there. ``builds``: builds for a device that is elsewhere. ``""``: neither;
    then the latency is predicted, unless the user named this backend."""
    title: str = ""
    """Its name on this device, as ``doctor`` and the self-test show it; "" where it is not installed."""
    obstacle: str = ""  # why it does neither, in a few words; "" where it is not meant for the place
    hint: str = ""  # what to do about the obstacle
    is_unexpected: bool = False
    """Who left the choice to mptune is told of the obstacle: without it, this backend would serve."""
    is_models_fault: bool = False  # it would do but for this model
    loads_plugins: bool = False  # its engines take TensorRT plugins
    notes: tuple[str, ...] = ()  # what to know about figures that are measured there


@dataclass(frozen=True)
class BackendStatus:
    """One line of ``mptune doctor``."""

    name: str
    available: bool
    reason: str
    install: str = ""  # the command that installs it; empty where nothing is missing


@dataclass(frozen=True)
class Built:
    """An engine that was built."""

    engine: Engine
    build_s: float | None = None
    """Seconds to build it, 0 where its file was there; None where opening it builds it."""
    warnings: tuple[str, ...] = ()
    is_kept: bool = False  # its file stays, for later evaluations and for the user


class Builder(ABC):
    """Builds the engines of one run, and says what is particular about them."""

    profiling: Profiling = "none"  # whether ``layer_times`` gives times
    fuses = True
    """Whether engines fuse nodes into one kernel; else the result of each node is rounded and written to memory."""
    emulation_holds = True  # whether engines round every value that a plan puts in FP16
    opens_beside = False
    """Whether engines may be opened in several processes at once: opening one times nothing on the device, and takes
    long in one thread of a process."""

    @abstractmethod
    def build(self, plan: PrecisionPlan, *, baseline: bool = False) -> Built | Failure:
        """The engine of a plan; the ``baseline``'s, which candidates are timed in turn with, stays until ``close``."""

    def build_tf32(self) -> Built | Failure | None:
        """The engine of all-FP32 whose products and convolutions may use TF32; None where it has no such engine."""
        return None

    @abstractmethod
    def release(self, plan: PrecisionPlan, *, faulty: bool = False) -> None:
        """The engine of a plan has been evaluated; where it is faulty, its file is not to be used again."""

    @abstractmethod
    def close(self) -> None:
        """Delete what the run does not keep. Idempotent."""

    def layer_times(self, built: Built) -> tuple[LayerTime, ...] | Failure:
        """The time of each layer, in a session that is opened anew: no fault costs the latency."""
        return ()

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        """See ``Toolchain``, as of ``fused_nodes``."""
        return ()

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        return ()


class Backend(Protocol):
    """Builds and opens engines. Found by its name (``mptune.engines.environment``)."""

    name: str

    def available(self, place: Place) -> Availability:
        """What it can do for a place."""

    def statuses(self, gpus: Sequence[Gpu]) -> tuple[BackendStatus, ...]:
        """What it can do on this machine, for ``mptune doctor``."""

    def builder(self, reference: ReferenceModel, target: Target, gpu: Gpu | None) -> Builder:
        """What builds the engines of one run: of the model of ``reference``, in its worker."""


class ModelBuilder(Builder):
    """Builds for a backend that opens the typed model itself: it is written for each plan and deleted afterwards."""

    def __init__(self, reference: ReferenceModel, make_engine: Callable[[Path, PrecisionPlan], Engine]) -> None:
        self.reference, self.context = reference, reference.context
        self._make_engine = make_engine
        self._written: dict[str, Path] = {}

    def build(self, plan: PrecisionPlan, *, baseline: bool = False) -> Built | Failure:
        return Built(self._make_engine(self.typed_model(plan, baseline=baseline), plan))

    def release(self, plan: PrecisionPlan, *, faulty: bool = False) -> None:
        if plan.fingerprint in self._written:
            self._written.pop(plan.fingerprint).unlink(missing_ok=True)

    def close(self) -> None:
        while self._written:
            self._written.popitem()[1].unlink(missing_ok=True)

    def typed_model(self, plan: PrecisionPlan, *, baseline: bool = False) -> Path:
        """The typed model of a plan, written where it is not there."""
        name = "baseline" if baseline else plan.fingerprint
        if name not in self._written:
            self._written[name] = self.write(plan, name)
        return self._written[name]

    @contextmanager
    def written(self, plan: PrecisionPlan, name: str) -> Iterator[Path]:
        """The typed model of a plan, which is deleted at the end."""
        path = self.write(plan, name)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def write(self, plan: PrecisionPlan, name: str) -> Path:
        """Write the typed model of a plan beside the weight bank."""
        return self._rewriter.write(plan, self.context.scratch(name))

    @cached_property
    def _rewriter(self) -> Rewriter:
        from mptune.graph.folded import folded_model  # as of ``RunContext.rewriter``
        from mptune.graph.writing.rewrite import Rewriter

        return Rewriter(folded_model(self.context.grouped, self.reference.folded_values), self.context.bank)
