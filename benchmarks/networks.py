"""Searches whole networks on the device here, and prints the table of the main README.

    python -m benchmarks.models.resnet50 --out W/resnet50  # likewise vit_s, swin_t, unet, decoder; raft with --batch 1
    python -m benchmarks.trained make W --models text-detector,text-recogniser,speech-quality
    python -m benchmarks.networks W --limit 540 --json benchmarks/results/networks.json
    python -m benchmarks.networks --json benchmarks/results/networks.json    # the table again

``W`` holds ``NAME.onnx`` with ``NAME.npz``, or ``NAME/fp32.onnx`` with the folder ``NAME/search``. Each is searched by
the command line in a process of its own, one after the other. The file is written after each: the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import save
from benchmarks.peers.own import last_words
from mptune.json_form import decode_float

ROOT = Path(__file__).resolve().parent.parent
TITLES = {
    "whisper": "Whisper base, encoder",
    "notes": "Basic Pitch, *trained*",
    "depth": "Depth Anything S, 266 px",
    "speech-quality": "DNSMOS speech quality, *trained*",
    "segformer": "SegFormer-B1, 512 px",
    "pitch-tiny": "CREPE tiny, *trained*",
    "convnext": "ConvNeXt-V2 nano, batch 1",
    "text-recogniser": "PP-OCRv4 text recogniser, *trained*",
    "rtdetr": "RT-DETR-R18, 640 px",
    "body-detector": "NudeNet detector, *trained*",
    "text-detector": "PP-OCRv4 text detector, *trained*",
    "captcha-detector": "captcha detector, *trained*",
    "digits_vit": "the digits model, *trained*",
    "resnet50": "ResNet-50, batch 8",
    "vit_s": "ViT-S, batch 8",
    "swin_t": "Swin-T, batch 8",
    "raft": "RAFT-small",
    "unet": "U-Net with cross attention",
    "decoder": "decoder blocks, RMSNorm and RoPE",
    "detector": "detector with FPN and decode",
}
HEADER = (
    "| network | all-FP32, ms | TF32, ms | error | all-FP16, ms | error | chosen, ms | error | groups in FP32 |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def networks_of(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Name, model and samples of each network, in the order of ``TITLES``."""
    models = ROOT / "benchmarks" / "models"
    for name in TITLES:
        for model, data in (
            (folder / f"{name}.onnx", folder / f"{name}.npz"),
            (folder / name / "fp32.onnx", folder / name / "search"),
            (models / f"{name}.onnx", models / "digits_calib.npz"),
        ):
            if model.exists() and data.exists():
                yield name, model, data
                break


def searched(model: Path, data: Path, timeout_s: float, kept: Path | None) -> dict[str, Any]:
    """Front, baselines and seconds of one search, whose model goes to ``kept``, too; else what the search printed."""
    with tempfile.TemporaryDirectory() as folder:
        run, start = Path(folder) / "run.mptune", time.monotonic()
        command = [sys.executable, "-m", "mptune", "search", str(model), "--data", str(data), "--out", str(run)]
        if (failure := last_words(command, timeout_s, cwd=ROOT)) is not None:
            return {"failure": failure}
        front = json.loads((run / "front.json").read_text(encoding="utf-8"))
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(run / "chosen" / "model.onnx", kept)
        return {
            "seconds": round(time.monotonic() - start, 1),
            "target": front["target"],
            "choice": front["choice"],
            "evaluations": front["evaluations"],
            **{name: _short(point) for name, point in (*front["baseline"].items(), ("chosen", front["chosen_point"]))},
            "front": [_short(point) for point in front["points"]],
            "findings": [finding["code"] for finding in front["findings"]],
            "warnings": front["warnings"],
        }


def _short(point: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if point is None:
        return None
    latency, error = point["latency"], point["error"]
    return {
        "plan": point["plan"],
        "ms": latency["median_ms"],
        "ci95_ms": latency["ci95_ms"],
        "source": latency["source"],
        "error": error["value"],
        "held_out": error["held_out"],
        "fp16_groups": point["fp16_groups"],
        "fp32_groups": point["fp32_groups"],
        "remeasured": point["remeasured"],
    }


def table(results: Mapping[str, Any]) -> str:
    """Markdown; errors on held-out samples. TF32's are on the search's where it has no others."""
    return "\n".join((HEADER, *(_row(TITLES[name], result) for name, result in results.items())))


def _row(title: str, result: Mapping[str, Any]) -> str:
    if "failure" in result:
        return f"| {title} | " + " | ".join("-" * 8) + " |"
    fp32, tf32, fp16, chosen = (result.get(name) for name in ("fp32", "tf32", "fp16", "chosen"))
    groups = f"{chosen['fp32_groups']} of {chosen['fp16_groups'] + chosen['fp32_groups']}"
    if fp16 is not None and fp16["plan"] == chosen["plan"]:
        groups = "FP16 is enough" + (f", {chosen['fp32_groups']} pinned" if chosen["fp32_groups"] else "")
    time_ms = f"{_ms(chosen)} ({fp32['ms'] / chosen['ms']:.2f}x)"
    cells = (title, _ms(fp32), _ms(tf32), _error(tf32), _ms(fp16), _error(fp16), time_ms, _error(chosen), groups)
    return f"| {' | '.join(cells)} |"


def _ms(point: Mapping[str, Any] | None) -> str:
    return "-" if point is None else f"{point['ms']:.3g}"


def _error(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "-"
    value = decode_float(point["error"] if point["held_out"] is None else point["held_out"])
    return f"{value:.1e}" if value < float("inf") else "not finite"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="folder for the chosen models, for benchmarks.peers final --searched")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds; no network is begun after")
    options = parser.parse_args()
    end = time.monotonic() + options.limit
    document = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {"networks": {}}
    for name, model, data in networks_of(options.folder) if options.folder else ():
        left_s = end - time.monotonic()
        if name in document["networks"] or left_s < 30.0:
            continue
        document["networks"][name] = searched(model, data, left_s, options.keep and options.keep / f"{name}.onnx")
        save(options.json, document)
        print(name, document["networks"][name].get("failure", "done"), file=sys.stderr, flush=True)
    print(table({name: document["networks"][name] for name in TITLES if name in document["networks"]}))


if __name__ == "__main__":
    main()
