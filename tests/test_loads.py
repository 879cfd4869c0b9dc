"""A candidate is opened as a user would before it is compared; what mptune wrote is opened before it says done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, version_converter

import mptune
from mptune.cli import main
from mptune.engines import loading
from mptune.errors import ModelError
from mptune.graph.writing.rewrite import Rewriter
from mptune.processes.parent import Worker
from tests.graph import models

LAYERNORM = Path(__file__).parent / "graph" / "corpus" / "layernorm_13.onnx"


def stale(proto: onnx.ModelProto) -> None:
    """The file says FP16 of a value that the nodes compute in FP32."""
    proto.graph.value_info.append(models.value("h", ["batch", 16], TensorProto.FLOAT16))


def unknown_operator(proto: onnx.ModelProto) -> None:
    proto.graph.node[3].domain, proto.graph.node[3].op_type = "com.example", "MyRelu"


def mixed_operands(proto: onnx.ModelProto) -> None:
    """An Add of FP32 and FP16."""
    proto.graph.initializer[3].CopyFrom(models.constant("b1", np.zeros(16), np.float16))


def shared_name(proto: onnx.ModelProto) -> None:
    """ONNX lets nodes share a name, ONNX Runtime does not."""
    proto.graph.node[2].name = proto.graph.node[1].name


def lost_weights(proto: onnx.ModelProto) -> None:
    tensor = proto.graph.initializer[2]
    onnx.external_data_helper.set_external_data(tensor, "weights.bin")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL


@pytest.fixture
def mlp(tmp_path: Path) -> tuple[Path, Path]:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    return models.save(models.mlp(), tmp_path), tmp_path / "data.npz"


@pytest.mark.parametrize(
    ("command", "spoil", "says"),
    [
        ("check", stale, "candidate.onnx does not load: Type Error"),
        ("compare", unknown_operator, "candidate.onnx does not load: Fatal error: com.example:MyRelu"),
        ("check", shared_name, "candidate.onnx does not load: "),
        ("compare", mixed_operands, "candidate.onnx does not type-check"),
        ("check", lost_weights, "weights.bin"),
    ],
)
def test_a_candidate_that_does_not_load_is_an_error(
    command: str,
    spoil: Callable[[onnx.ModelProto], None],
    says: str,
    mlp: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, data = mlp
    proto = models.mlp()
    spoil(proto)
    candidate = models.save(proto, path.parent, "candidate.onnx")
    words = f"{candidate} --against {path} --max-error 0.1" if command == "check" else f"{path} {candidate}"
    assert main([command, *words.split(), "--data", str(data)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert [line.partition(":")[0] for line in err.splitlines()] == ["error", "hint"]


def test_a_candidate_with_external_data_and_one_without_cpu_kernels_are_compared(
    mlp: tuple[Path, Path], tmp_path: Path
) -> None:
    path, data = mlp
    (tmp_path / "other").mkdir()
    outside = tmp_path / "other" / "model.onnx"
    onnx.save(models.mlp(), outside, save_as_external_data=True, size_threshold=0)
    assert mptune.check(outside, against=path, data=data, max_error=1e-6).agrees
    bf16 = mptune.apply(path, None, tmp_path / "bf16.onnx", reduced="bf16")
    assert mptune.check(bf16, against=path, data=data, max_error=0.1).agrees


def test_what_only_an_optimisation_breaks_is_a_warning(tmp_path: Path) -> None:
    """A valid model that ONNX Runtime's LayerNormFusion breaks."""
    source = tmp_path / "raised.onnx"
    onnx.save(version_converter.convert_version(onnx.load(LAYERNORM), 17), source)
    warned: list[str] = []
    mixed = mptune.apply(source, None, tmp_path / "mixed.onnx", keep_fp32=["kind:norm"], warn=warned.append)
    with pytest.raises(Exception, match="/LayerNormFusion/"):  # where this no longer fails, nothing is to be said
        onnxruntime.InferenceSession(str(mixed), providers=["CPUExecutionProvider"])
    assert any("without graph optimisations only" in text for text in warned)
    data = np.random.default_rng(0).standard_normal((6, 9, 16), np.float32)
    comparison = mptune.compare(source, mixed, data=data)
    assert comparison.agrees
    assert f"{mixed} loads in ONNX Runtime without graph optimisations only" in comparison.warnings[0]


def test_apply_says_where_the_source_does_not_load_either(mlp: tuple[Path, Path], tmp_path: Path) -> None:
    proto = models.mlp()
    unknown_operator(proto)
    warned: list[str] = []
    out = mptune.apply(models.save(proto, tmp_path), None, tmp_path / "out.onnx", warn=warned.append)
    assert out.exists()
    assert "out.onnx does not load: Fatal error: com.example:MyRelu" in warned[-1]
    assert "nor does" in warned[-1]


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewriter has a fault: what it exports contradicts its own types."""
    export = Rewriter.export

    def spoil(self: Rewriter, plan: mptune.PrecisionPlan, path: Path, *others: object) -> Path:
        export(self, plan, path, *others)  # type: ignore[arg-type]
        proto = onnx.load(path)
        proto.graph.value_info.append(models.value(proto.graph.node[0].output[0], None, TensorProto.DOUBLE))
        onnx.save(proto, path)
        return path

    monkeypatch.setattr(Rewriter, "export", spoil)


@pytest.mark.usefixtures("spoilt")
def test_apply_writes_nothing_that_does_not_load(mlp: tuple[Path, Path], tmp_path: Path) -> None:
    path, _ = mlp
    out = tmp_path / "new" / "out.onnx"
    with pytest.raises(ModelError, match=r"out\.onnx does not load") as caught:
        mptune.apply(path, None, out)
    assert caught.value.exit_code == 1
    assert "a fault of mptune" in caught.value.hint
    assert list(out.parent.iterdir()) == []
    out.write_text("what was there")
    with pytest.raises(ModelError):
        mptune.apply(path, None, out, force=True)
    assert [each.read_text() for each in out.parent.iterdir()] == ["what was there"]


@pytest.mark.usefixtures("spoilt")
def test_a_search_ships_nothing_that_does_not_load(mlp: tuple[Path, Path], tmp_path: Path) -> None:
    path, data = mlp
    with pytest.raises(ModelError, match="does not load: Type Error"):
        mptune.search(path, data=data, out=tmp_path / "run", budget=3, target="jetson-orin-nano-8gb")
    assert not (tmp_path / "run" / "chosen").exists()


def test_a_search_opens_its_model_once(mlp: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    call = Worker.call

    def noted(worker: Worker, job: object, timeout_s: float | None = None) -> object:
        opened.extend([job.model] if isinstance(job, loading.OpenJob) else [])
        return call(worker, job, timeout_s)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "call", noted)
    path, data = mlp
    for _ in range(2):
        mptune.search(path, data=data, out=tmp_path / "run", budget=3, target="jetson-orin-nano-8gb")
    assert [each.name for each in opened] == ["model.onnx"]
