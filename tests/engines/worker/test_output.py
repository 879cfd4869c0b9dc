from __future__ import annotations

from mptune.engines.worker.process import KEEP_BYTES, Output


def test_output_keeps_the_beginning_and_the_end() -> None:
    output = Output()
    for index in range(40):
        output.add(bytes([index]) * 100_000)
    text = output.text()
    assert text.startswith(bytes([0]))
    assert text.endswith(bytes([39]))
    left_out = 40 * 100_000 - 2 * KEEP_BYTES
    assert f"[... {left_out} bytes left out ...]".encode() in text
    output.clear()
    output.add(b"short")
    assert output.text() == b"short"
