"""What sessions of ONNX Runtime's CPU provider are opened with."""

from __future__ import annotations

from pathlib import Path

import onnxruntime

from mptune.engines.ort.session import CpuSession, SessionOptions
from tests.graph import models


def test_int8_products_do_not_saturate_without_vnni(tmp_path: Path) -> None:
    session = CpuSession(models.save(models.mlp(), tmp_path), SessionOptions("cpu", timing=False))
    opened: onnxruntime.InferenceSession = session._open_session()
    assert opened.get_session_options().get_session_config_entry("session.x64quantprecision") == "1"
