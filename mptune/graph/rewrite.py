"""Carry out a plan: the same model with FP16 constants and explicit Casts.

*Requires* a model from ``load_model`` and groups from ``find_groups``. *Ensures*: the interface is unchanged; each
value is cast at most once per type, right after its producer; constants are converted, never cast at run time; shape,
index and boolean values are untouched; the same plan gives the same bytes; the all-FP32 plan changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from mptune.graph.assemble import (
    SELF_CONTAINED_LIMIT,
    Parts,
    Spelling,
    Suffixed,
    Variant,
    cast_node,
    write_pieces,
    writing,
)
from mptune.graph.casts import Folds
from mptune.graph.constants import ConstantSource, DataFile, Shelf, banked, inline
from mptune.graph.flow import Flow, Resolution, new_suffix
from mptune.graph.groups import LayerGroup, find_groups
from mptune.graph.model import Model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.weights import WeightBank
from mptune.graph.wire import Piece, join, total_size

FP32 = onnx.TensorProto.FLOAT
FP16 = onnx.TensorProto.FLOAT16


class Rewriter:
    """Writes typed models of one model. Made once; each plan then costs milliseconds."""

    def __init__(self, model: Model, groups: Sequence[LayerGroup], bank: WeightBank | None = None) -> None:
        self.flow = Flow(model, groups)
        self._model = model
        self._bank = bank
        self._to_fp16 = new_suffix(model, "fp16")
        self._to_fp32 = new_suffix(model, "fp32")
        self._fp16_name, self._fp32_name = Suffixed(self._to_fp16), Suffixed(self._to_fp32)
        constants = {c: self._fp16_name[c] for c in self.flow.constants}
        # An FP16 value under a name that must stay FP32 leaves it to an FP32 copy.
        outputs = {t: self._fp16_name[t] for t in self.flow.narrowable & self.flow.named}
        self._parts = Parts(self.flow, Spelling(constants, outputs, retyped=True))
        self._stored = self._shelf(inline if bank is None else banked(bank))

    def write(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the typed model to ``path``, which must lie in the weight bank's folder.

        Raises:
            PlanError: the plan does not fit the model.
            RunError: the file cannot be written, or the disk is full.
        """
        return write_pieces(path, self._pieces(plan, self._stored))

    def export(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the typed model self-contained; past 2 GiB its weights lie in ``path`` + ``.data``.

        Raises:
            PlanError: the plan does not fit the model.
            RunError: the file cannot be written, or the disk is full.
        """
        files = self.exported_files(plan, path)
        if len(files) == 1:
            return write_pieces(path, self.pieces(plan))
        with writing(files[1]), DataFile(files[1]) as data:
            return write_pieces(path, self._pieces(plan, self._shelf(data)), data.publish)

    def exported_files(self, plan: PrecisionPlan, path: Path) -> tuple[Path, ...]:
        """What ``export`` would write and replace: ``path``, and past 2 GiB the file of weights beside it.

        Raises:
            PlanError: the plan does not fit the model.
        """
        if total_size(self.pieces(plan)) <= SELF_CONTAINED_LIMIT:
            return (path,)
        return path, path.with_name(path.name + ".data")

    def node_precisions(self, plan: PrecisionPlan) -> dict[str, Precision]:
        """The precision of every node that has one, by node name."""
        return self.flow.node_precisions(plan)

    def boundaries(self, plan: PrecisionPlan) -> int:
        """How many Casts the plan adds: one for each value that crosses, less the model's own that go away."""
        return self.flow.resolve(plan).added_casts

    def pieces(self, plan: PrecisionPlan) -> list[Piece]:
        """The typed model, self-contained, as the pieces of its file."""
        return self._pieces(plan, self._shelf(inline))

    def _pieces(self, plan: PrecisionPlan, shelf: Shelf) -> list[Piece]:
        resolution = self.flow.resolve(plan)
        return self._parts.put_together(resolution, self._variant(resolution, shelf))

    def _shelf(self, source: ConstantSource) -> Shelf:
        return Shelf(self.flow, self._bank, source, self._to_fp16)

    def _variant(self, resolution: Resolution, shelf: Shelf) -> Variant:
        half, named, folds = resolution.half, self.flow.named, resolution.folds
        to_fp16, to_fp32 = self._fp16_name, self._fp32_name
        moved = {t: to_fp16[t] for t in half & named}  # FP16 values that must leave their name to an FP32 copy
        follow = dict(moved)
        other: dict[str, str] = {}
        after: dict[str, bytes] = {}
        for t in resolution.crossing:
            adopted = folds.adopted.get(t)
            if t in half and t in named:
                after[t] = cast_node(to_fp16[t], t, FP32, to_fp32[t])
                continue
            result = adopted.result if adopted else (to_fp32 if t in half else to_fp16)[t]
            name = self._model.nodes[adopted.index].name if adopted else result
            after[t] = cast_node(t, result, FP32 if t in half else FP16, name)
            (other if t in half else follow)[t] = result
        any_type = dict(moved)
        if self.flow.own_casts:
            constants_fp16 = {c: to_fp16[c] for c in resolution.constants_fp16}
            self._fold(folds, {**follow, **constants_fp16}, follow, other, any_type)
        constants, dropped = shelf.take(resolution)
        lead = [after[t] for t in resolution.crossing if t not in self._model.producer]
        return Variant(follow, other, any_type, after, lead, constants, dropped | folds.dropped)

    @staticmethod
    def _fold(
        folds: Folds,
        in_fp16: Mapping[str, str],
        follow: dict[str, str],
        other: dict[str, str],
        any_type: dict[str, str],
    ) -> None:
        """Let what read the results of needless Casts read their roots; ``in_fp16``: names of values in FP16."""

        def narrow(root: str) -> str:
            while root not in in_fp16 and root in folds.folded:
                root = folds.folded[root]
            return in_fp16.get(root, root)

        follow.update((name, narrow(root)) for name, root in folds.narrow.items())
        other.update((name, other.get(root, root)) for name, root in folds.wide.items())
        other.update((name, narrow(root)) for name, root in folds.folded.items())
        for name, root in folds.either.items():
            any_type[name] = narrow(root) if root in folds.folded else any_type.get(root, root)


def rewrite(model: Model, plan: PrecisionPlan, groups: Sequence[LayerGroup] | None = None) -> onnx.ModelProto:
    """The typed model in memory, self-contained; ``groups`` default to fusion granularity.

    Raises:
        PlanError: the plan does not fit the model.
    """
    rewriter = Rewriter(model, find_groups(model) if groups is None else groups)
    return onnx.load_model_from_string(join(rewriter.pieces(plan)))
