"""Predicted latencies held against published ones, and the constant of the roofline chosen by them.

    pip install -e ".[published]"
    python -m benchmarks.published --models FOLDER --json benchmarks/results/published.json

Reads ``tensorrt.csv``, exports the networks it names without trained weights (``architectures``), and predicts each
latency by the roofline. Networks that FOLDER has already are not exported again, and need no torch. A line
for each module and precision: how many, Kendall's tau, median and log-sd of published over predicted; the same with
each family of architectures, then each module, left out of the fit, and with the shares that large kernels alone reach.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import rounded, save
from benchmarks.published.fit import Agreement, Case, Network, Predict, fit_share, left_out
from benchmarks.published.table import TABLE, Published, read_table
from mptune.graph.loading.model import load_model
from mptune.targets.roofline import NETWORK_SHARE
from mptune.targets.target import load_target

FITS = ("with all", "family left out", "module left out", "large kernels")


def model_file(row: Published, folder: Path) -> Path:
    """The network of a row, exported first where the folder does not have it."""
    path = folder / f"{row.network}.onnx"
    if not path.exists():
        try:
            from benchmarks.published.architectures import export
        except ImportError as error:
            raise SystemExit(f'{path} is missing, and {error}\nhint: pip install "mptune[published]"') from error
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        export(row.network, row.size, row.batch, partial)
        partial.rename(path)
    return path


def read_cases(rows: Sequence[Published], folder: Path) -> list[Case]:
    """What predicts each row; a network is loaded once."""
    predictors: dict[tuple[str, str, str], Predict] = {}
    for name in dict.fromkeys(row.network for row in rows):
        same = [row for row in rows if row.network == name]
        network = Network(load_model(model_file(same[0], folder)))
        for r in same:
            predictors[name, r.target, r.precision] = network.predictor(load_target(r.target), r.precision)
    return [Case(row, predictors[row.network, row.target, row.precision]) for row in rows]


def judged(cases: Sequence[Case]) -> dict[str, Any]:
    """The share, and for each row the logs of published over predicted by each of ``FITS``."""
    fitted = fit_share(cases)
    print(f"share of large kernels by all rows: {fitted:.3f}; mptune's: {NETWORK_SHARE:g}")
    families, modules = (left_out(cases, part) for part in (lambda row: row.family, lambda row: row.target))
    rows = []
    for k, case in enumerate(cases):
        row = case.published
        logs = (case.log_ratio(NETWORK_SHARE), families[k], modules[k], case.log_ratio(1.0))
        rows.append([row.module, row.precision, row.network, row.family, row.ms, *map(rounded, logs)])
    return {
        "share": NETWORK_SHARE,
        "fitted_share": rounded(fitted),
        "columns": ["module", "precision", "network", "family", "published_ms", *(f"log ratio, {fit}" for fit in FITS)],
        "rows": rows,
    }


def agreements(document: Mapping[str, Any], fit: str) -> dict[tuple[str, str], Agreement]:
    """Module and precision -> how the predictions of one of ``FITS`` agree."""
    column = len(document["columns"]) - len(FITS) + FITS.index(fit)
    parts: dict[tuple[str, str], list[Sequence[Any]]] = {}
    for row in document["rows"]:
        parts.setdefault((row[0], row[1]), []).append(row)
    return {key: Agreement.of([r[4] for r in rows], [r[column] for r in rows]) for key, rows in sorted(parts.items())}


def table(document: Mapping[str, Any]) -> str:
    """In Markdown: a line per module and precision."""
    every = {fit: agreements(document, fit) for fit in FITS}
    heads = "| module | precision | n | tau | median, log-sd | family left out | module left out | large kernels; tau |"
    lines = [heads, "|" + " --- |" * 8]
    for key, whole in every["with all"].items():
        before = every["large kernels"][key]
        cells = [*key, str(whole.count), _tau(whole), *(_spread(every[fit][key]) for fit in FITS[:3])]
        lines.append("| " + " | ".join([*cells, f"{_spread(before)}; {_tau(before)}"]) + " |")
    return "\n".join(lines)


def _tau(agreement: Agreement) -> str:
    return "-" if math.isnan(agreement.tau) else f"{agreement.tau:.2f}"


def _spread(agreement: Agreement) -> str:
    return f"{agreement.median:.2f}" + (f", {agreement.log_sd:.2f}" if agreement.count > 1 else "")


def within(document: Mapping[str, Any], factor: float, fit: str = "family left out") -> tuple[int, int]:
    """How many rows that choose the share lie within a factor of their prediction, and how many there are."""
    column = len(document["columns"]) - len(FITS) + FITS.index(fit)
    logs = [row[column] for row in document["rows"] if "not stated" not in row[0]]
    return int(np.sum(np.abs(logs) <= math.log(factor))), len(logs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of the exported networks")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    document = judged(read_cases(read_table(options.table), options.models))
    print(table(document))
    for factor in (1.25, 1.5, 2.0):
        count, whole = within(document, factor)
        print(f"within a factor of {factor:g}, family left out: {count} of {whole}")
    save(options.json, document, lists=("rows",))


if __name__ == "__main__":
    main()
