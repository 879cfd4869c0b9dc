"""Carry out a plan: the same model with FP16 constants and explicit Casts.

*Requires* a model from ``load_model`` and groups from ``find_groups``. *Ensures*: the interface is unchanged; each
value is cast at most once per type, right after its producer; constants are converted, never cast at run time; shape,
index and boolean values are untouched; the same plan gives the same bytes; the all-FP32 plan changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from mptune.files import whole_file, write_bytes, writing
from mptune.graph.casting.value_types import Flow, Resolution, new_suffix
from mptune.graph.grouping.groups import LayerGroup, find_groups
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.assemble import SELF_CONTAINED_LIMIT, Changes, Parts, cast_node, chunks_of
from mptune.graph.writing.constants import ConstantSource, DataFile, Shelf, banked, inline
from mptune.graph.writing.segments import Reads, Spelling
from mptune.graph.writing.weights import WeightBank
from mptune.graph.writing.wire import Piece, join, total_size

FP32 = onnx.TensorProto.FLOAT
FP16 = onnx.TensorProto.FLOAT16


class _Typed(Spelling):
    """Values change type where the plan says; one that must keep its name in FP32 leaves it to a copy."""

    retyped = True

    def __init__(self, flow: Flow, to_fp16: str, to_fp32: str) -> None:
        self._named = flow.named
        self._to_fp16 = to_fp16
        self._to_fp32 = to_fp32

    def constant(self, name: str) -> str:
        return name + self._to_fp16

    def computed(self, name: str) -> str:
        return self.in_fp16(name, True)

    def in_fp16(self, name: str, is_half: bool) -> str:
        return name if is_half and name not in self._named else name + self._to_fp16

    def in_fp32(self, name: str, is_half: bool) -> str:
        return name + self._to_fp32 if is_half and name not in self._named else name

    def behind(self, name: str, is_half: bool) -> bytes:
        fp16, fp32 = self.in_fp16(name, is_half), self.in_fp32(name, is_half)
        return cast_node(fp16, fp32, FP32, name + self._to_fp32) if is_half else cast_node(fp32, fp16, FP16, fp16)


class Rewriter:
    """Writes typed models of one model. Made once; each plan then costs milliseconds."""

    def __init__(self, model: Model, groups: Sequence[LayerGroup], bank: WeightBank | None = None) -> None:
        self.flow = Flow(model, groups)
        self._model = model
        self._bank = bank
        self._to_fp16 = new_suffix(model, "fp16")
        self._spelling = _Typed(self.flow, self._to_fp16, new_suffix(model, "fp32"))
        self._parts = Parts(self.flow, self._spelling, self.flow.may_cross)
        self._stored = self._shelf(inline if bank is None else banked(bank))

    def write(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the typed model to ``path``, which must lie in the weight bank's folder.

        Raises:
            PlanError: the plan does not fit the model.
            RunError: the file cannot be written, or the disk is full.
        """
        return write_bytes(path, chunks_of(self._pieces(plan, self._stored)))

    def export(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the typed model self-contained; past 2 GiB its weights lie in ``path`` + ``.data``.

        Raises:
            PlanError: the plan does not fit the model.
            RunError: the file cannot be written, or the disk is full.
        """
        files = self.exported_files(plan, path)
        if len(files) == 1:
            return write_bytes(path, chunks_of(self.pieces(plan)))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with (  # The last ends first, so the data have their name before the model has.
                whole_file(path) as model_file,
                whole_file(files[1]) as data_file,
                DataFile(data_file, files[1].name) as data,
                model_file.open("wb") as file,
            ):
                file.writelines(chunks_of(self._pieces(plan, self._shelf(data))))
        return path

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
        constants, dropped = shelf.take(resolution)
        changes = Changes(dropped=dropped)
        if self.flow.own_casts:
            changes = self._folded(resolution, dropped)
        return self._parts.put_together(resolution, resolution.crossing.flags, constants, changes)

    def _shelf(self, source: ConstantSource) -> Shelf:
        return Shelf(self.flow, self._bank, source, self._to_fp16)

    def _folded(self, resolution: Resolution, dropped: set[int]) -> Changes:
        """Let what read the results of needless Casts read their roots."""
        half, folds = resolution.half, resolution.folds
        adopted = {root: cast.result for root, cast in folds.adopted.items()}

        def in_fp16(root: str) -> str:
            while root in folds.folded:
                root = folds.folded[root]
            if root in resolution.constants_fp16:
                return self._spelling.constant(root)
            if root in half:
                return self._spelling.in_fp16(root, True)
            return adopted.get(root, self._spelling.in_fp16(root, False)) if root in resolution.crossing else root

        def in_fp32(root: str) -> str:
            return adopted.get(root, self._spelling.in_fp32(root, True))

        follow = {t: result for t, result in adopted.items() if t not in half}
        other = {t: result for t, result in adopted.items() if t in half}
        behind = {
            t: cast_node(t, cast.result, FP32 if t in half else FP16, self._model.nodes[cast.index].name)
            for t, cast in folds.adopted.items()
        }
        follow |= {name: in_fp16(root) for name, root in folds.narrow.items()}
        other |= {name: in_fp32(root) for name, root in folds.wide.items()}
        other |= {name: in_fp16(root) for name, root in folds.folded.items()}
        either = {
            name: in_fp16(root) if root in folds.folded or root in half else root for name, root in folds.either.items()
        }
        names = {Reads.FP16: follow, Reads.FP32: other, Reads.AS_COMPUTED: either}
        return Changes(names, behind, dropped=dropped | folds.dropped)


def rewrite(model: Model, plan: PrecisionPlan, groups: Sequence[LayerGroup] | None = None) -> onnx.ModelProto:
    """The typed model in memory, self-contained; ``groups`` default to fusion granularity.

    Raises:
        PlanError: the plan does not fit the model.
    """
    rewriter = Rewriter(model, find_groups(model) if groups is None else groups)
    return onnx.load_model_from_string(join(rewriter.pieces(plan)))
