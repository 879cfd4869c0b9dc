"""How many findings of severity warning and above are false, over sound and broken models.

python -m benchmarks.false_alarms [--seeds 5] [--only TEXT] [--search] [--json OUT]

Every model is inspected with data (``mptune inspect MODEL --data``). What is right to name is known by construction:

* the six networks of ``benchmarks.models.small_networks``, sound and with each planted fault, for each seed;
* the zoo of the tests: each situation shows its code, each sound twin none;
* models, and sound recordings, that are compared (``mptune compare MODEL --data``);
* the corpus of graphs and the exported networks: nobody planted a fault; what is right for them stands in ``KNOWN``,
  with the reason, and in the tests' expectations of the networks. Their data are drawn.

Each of the six networks is compared with its own FP16 model, too, which must load, and with a copy whose value_info
contradicts it, which must be refused.

A finding is false where its code is not among those of its model. A mask that mptune holds as a number must be named,
and is false as a warning. ``--search`` searches the six sound networks, too, for what only a plan shows. Writes a line
for each finding and the rate; exits with 1 where more than 1 in 50 is false.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx

import mptune
from benchmarks.common import save
from benchmarks.models.small_networks import NETWORKS
from mptune.engines.loading import load_typed_model
from mptune.errors import ModelError, MptuneError
from mptune.finding import CODES, Finding
from tests.diagnosis.recordings import Arrays
from tests.diagnosis.test_recordings import FED, SOUND, fragile
from tests.diagnosis.test_two_models import LIMITED, ROWS, converted, masked_and_normed
from tests.graph.helpers import feeds
from tests.networks.expected import expected
from tests.networks.networks import FILES, filled, samples
from tests.zoo.fp32 import specimens
from tests.zoo.graphs import FURTHER_GRAPHS, GRAPHS
from tests.zoo.numbers import SHOWN
from tests.zoo.numbers.further import FURTHER, HELD

TESTS = Path(__file__).resolve().parent.parent / "tests"

KNOWN: dict[str, dict[str, str]] = {
    "dynamic_sequence": {"duplicate-samples": "one token of two values: six of the eight that are drawn are equal"},
    "fp16_island": {"already-mixed": "it holds FP16 nodes"},
    "mask_min": {"mask": "rows are masked whole, at -3.4e38"},
    "qdq": {"quantised-parts": "98 % of its FLOPs are quantised"},
    "scan_sum": {"rows-mix": "the Scan runs over axis 0"},
}
"""Model of the corpus -> code that is right for it -> why."""

BESIDE: dict[str, dict[str, str]] = {
    "stagnation of a running sum": {"output-constant": "the Tanh of a sum of 600 is 1"},
    "vanishing-epsilon, one over zero": {
        "overflow": "one over the epsilon is 1e9",
        "duplicate-samples": "two samples are zero",
    },
    "vanishing-epsilon below the normal numbers": {
        "overflow": "one over the epsilon is 1e6",
        "duplicate-samples": "two samples are zero",
    },
    "exp": {"overflow": "the exponentials reach 1e36 before they are infinite"},
    "masked": {"mask": "rows are masked whole"},
    "batch_norm": {
        "rows-mix": "in training mode it normalises by the statistics of the batch",
        "reference-zero": "one row minus its own mean is zero",
    },
    "faint_noise": {"stagnation": "FP16 loses noise of 3e-4 beside values near 1"},
    **{
        f"constant-data{case}": {"duplicate-samples": "all samples are equal"}
        for case in ("", ": a state that is fed back is none", ": a recurrent state is none")
    },
    "int64-range in a comparison": {"output-constant": "the marker stands at one place in all samples"},
    **{
        name: {"nothing-to-tune": "the network lies in an If"}
        for name in ("voice_twin", "constant-data: a state that is fed back is none (twin)")
    },
}
"""Case of the zoo -> codes that are right for it beside the one it shows -> why."""

HELD_FAULTS = frozenset({("encoder", "mask")})
"""Network and fault that mptune's models are right with: a mask of -1e9, held as -65504. It is named as ``info``."""

_INFO = {"long-sum", "norm-written-out"}
"""Of the zoo: what is no more than ``info`` once data were seen."""

MOST = 1 / 50

Named: TypeAlias = "tuple[str, Callable[..., Case]]"
"""A model's name, and what makes it: takes ``name`` and ``place``, a folder of its own."""


@dataclass
class Case:
    """A model with data.

    Attributes:
        name: of the model, with its fault and seed.
        model: its file.
        data: its data.
        right: codes that are right to name.
        planted: those that must be named; a miss is listed, and is no false alarm.
        held: those that must be named, and no more than ``info``: mptune's models are right there, others' are not.
        beside: what it is compared with, as ``mptune.compare`` takes it; inspected where there is none.
        is_candidate: it is compared with its own FP16 model and with a damaged copy.
    """

    name: str
    model: Path
    data: Path | None
    right: frozenset[str] = frozenset()
    planted: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    beside: dict[str, Path] = field(default_factory=dict)
    is_candidate: bool = False


@dataclass
class Row:
    """One finding, judged."""

    model: str
    code: str
    severity: str
    is_false: bool
    text: str


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=5, help="of the six networks")
    parser.add_argument("--only", default="", help="models whose name holds this text")
    parser.add_argument("--search", action="store_true", help="search the six sound networks, too")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    missed: list[str] = []
    models, start = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mptune-alarms-") as folder:
        for case in cases(Path(folder), options.seeds, options.only):
            is_searched = options.search and case.name.endswith(" sound 0")
            try:
                found, unnoticed = candidates(case) if case.is_candidate else judged(case, looked_at(case, is_searched))
            except MptuneError as error:
                print(f"left out {case.name}: {error.message[:150]}", flush=True)
                continue
            models += not case.is_candidate
            rows += found
            missed += [f"{case.name}: {code}" for code in unnoticed]
            for row in found:
                judgement = "FALSE" if row.is_false else "right"
                print(f"{judgement}  {row.model}: {row.severity} {row.code}: {row.text[:150]}", flush=True)
    false = sum(row.is_false for row in rows)
    rate = 100 * false / max(len(rows), 1)
    print(f"\n{models} models, {len(rows)} findings of warning and above, {false} false ({rate:.1f} %)")
    print(f"{len(missed)} planted faults missed; {time.monotonic() - start:.0f} s")
    for text in missed:
        print(f"missed: {text}")
    if options.json is not None:
        save(options.json, {"models": models, "findings": [asdict(row) for row in rows], "missed": missed})
    return int(false > MOST * len(rows))


def looked_at(case: Case, is_searched: bool) -> tuple[Finding, ...]:
    """What the plain commands find."""
    if case.beside:
        return mptune.compare(case.model, data=case.data, **case.beside, trace="candidate" in case.beside).findings
    findings = mptune.inspect(case.model, data=case.data).findings
    if is_searched:
        run = case.model.with_suffix(".mptune")
        front = mptune.search(case.model, data=case.data, out=run, budget=8, target="jetson-orin-nano-8gb")
        codes = {finding.code for finding in findings}
        findings += tuple(finding for finding in front.findings if finding.code not in codes)
    return findings


def judged(case: Case, findings: tuple[Finding, ...]) -> tuple[list[Row], list[str]]:
    """The findings of warning and above, one of each code however many nodes show it; and the codes that are missed."""
    serious = {finding.code: finding for finding in reversed(findings) if finding.severity != "info"}
    right = case.right | case.planted
    rows = [Row(case.name, code, each.severity, code not in right, each.message) for code, each in serious.items()]
    named = serious.keys() | (case.held & {finding.code for finding in findings})
    return rows, sorted((case.planted | case.held) - named)


def candidates(case: Case) -> tuple[list[Row], list[str]]:
    """The candidates of a sound model that are refused, each judged, and those that should have been."""
    sound = mptune.apply(case.model, None, case.model.with_name("sound.onnx"), data=case.data)
    proto = onnx.load(case.model)
    proto.graph.value_info.add(name=proto.graph.node[0].output[0]).type.tensor_type.elem_type = onnx.TensorProto.STRING
    stale = case.model.with_name("stale.onnx")
    onnx.save(proto, stale)
    refused: dict[Path, str] = {}
    for candidate in (sound, stale):
        try:
            mptune.compare(case.model, candidate, data=case.data)
        except ModelError as error:
            refused[candidate] = error.message
    rows = [Row(case.name, "does not load", "error", path == sound, text) for path, text in refused.items()]
    return rows, [] if stale in refused else ["does not load"]


def cases(folder: Path, seeds: int, only: str) -> Iterator[Case]:
    """All models, each in a folder of its own."""
    every = [*networks(seeds), *zoo(), *compared(), *stored()]
    sound = [(name, make) for name, make in networks(1) if " sound " in name]
    every += [(f"candidate {name}", partial(make, is_candidate=True)) for name, make in sound]
    for name, make in every:
        if only in name:
            place = folder / f"{abs(hash(name))}"
            place.mkdir()
            yield make(name=name, place=place)


def networks(seeds: int) -> Iterator[Named]:
    """The six networks, sound and with each fault."""
    for name, (make, faults) in NETWORKS.items():
        for fault, codes in {"sound": frozenset[str](), **faults}.items():
            for seed in range(seeds):
                net = make(np.random.default_rng(seed), fault)
                batch = "n" if seed % 2 or fault == "batch" else 1
                held = codes if (name, fault) in HELD_FAULTS else frozenset[str]()
                make_case = partial(placed, net.proto(batch=batch), net.data, planted=codes - held, held=held)
                yield f"{name} {fault} {seed}", make_case


def zoo() -> Iterator[Named]:
    """What shows each code, and its twins."""
    for name, twins in {**SHOWN, **FURTHER}.items():
        code = name.split()[0].rstrip(",:")
        for kind, make, planted in (("", twins[0], {code}), (" (twin)", twins[1], set[str]())):
            right = frozenset(BESIDE.get(name + kind, {}))
            held = frozenset(planted if name in HELD else ())
            show, shown = make(), frozenset(planted - _INFO) - held
            data = dict(show.data)
            yield f"zoo {name}{kind}", partial(placed, show.proto, data, right=right, planted=shown, held=held)
    for name, one in specimens().items():
        codes = frozenset({one.code} - {""})
        right = frozenset(BESIDE.get(name, {}))
        yield f"zoo {name}", partial(placed, one.proto, dict(one.data), right=right, planted=codes)
    for name, (broken, sound, _) in {**GRAPHS, **FURTHER_GRAPHS}.items():
        code = name.split()[0].rstrip(":")
        severe = frozenset({code} if CODES[code].severity != "info" else set())
        yield f"zoo {name}", partial(placed, broken(), None, planted=severe)
        yield f"zoo {name} (twin)", partial(placed, sound(), None)


def compared() -> Iterator[Named]:
    """Two models, and sound recordings beside a model that FP16 makes coarse."""
    for name, (variances, code) in LIMITED.items():
        yield f"compare {name}", partial(limited, variances, frozenset({code} - {""}))
    for name, make in SOUND.items():
        yield f"compare {name}", partial(recorded, make)


def limited(variances: np.ndarray, planted: frozenset[str], name: str, place: Path) -> Case:
    """A model, and what a converter makes of it, whose limits reach many constants."""
    proto = masked_and_normed(variances)
    case = placed(proto, ROWS, name, place, planted=planted)
    onnx.save(converted(proto), place / "half.onnx")
    # The trace shows where the named node lies.
    right = frozenset({"first-difference"}) if planted else case.right
    return replace(case, right=right, beside={"candidate": place / "half.onnx"})


def recorded(make: Callable[[Path, Path], Arrays], name: str, place: Path) -> Case:
    """A model, and what a sound deployment recorded."""
    case = placed(fragile(), FED, name, place)
    np.savez(place / "recorded.npz", **make(case.model, place))  # type: ignore[arg-type]
    return replace(case, beside={"outputs": place / "recorded.npz"})


def stored() -> Iterator[Named]:
    """Graphs of the tests and networks as exporters write them, on drawn data; networks of the tests."""
    for kind in ("corpus", "exported"):
        for path in sorted((TESTS / "graph" / kind).glob("*.onnx")):
            yield f"{kind} {path.stem}", partial(drawn, path, frozenset(KNOWN.get(path.stem, {})))
    for stem in FILES:
        if stem != "classifier":  # holds maps, and is refused
            yield f"network {stem}", partial(network, stem)


def placed(
    proto: onnx.ModelProto,
    data: dict[str, np.ndarray] | None,
    name: str,
    place: Path,
    right: frozenset[str] = frozenset(),
    planted: frozenset[str] = frozenset(),
    held: frozenset[str] = frozenset(),
    is_candidate: bool = False,
) -> Case:
    """A model and its data, written to a folder."""
    model, file = place / "model.onnx", None if data is None else place / "data.npz"
    onnx.save(proto, model)
    if file is not None:
        np.savez(file, **data)  # type: ignore[arg-type]
    return Case(name, model, file, right, planted, held, is_candidate=is_candidate)


def drawn(path: Path, right: frozenset[str], name: str, place: Path) -> Case:
    """A model of the tests with eight drawn samples, one file each."""
    model = load_typed_model(path, any_precision=True)
    save_folder(place / "data", [feeds(model, seed, batch=1) for seed in range(8)])
    return Case(name, path, place / "data", right)


def network(stem: str, name: str, place: Path) -> Case:
    """A network of the tests, with the findings that its test expects."""
    path, wanted = filled(stem, place), expected(stem)
    save_folder(place / "data", samples(load_typed_model(path, any_precision=True)))
    return Case(name, path, place / "data", wanted.findings | wanted.on_data)


def save_folder(folder: Path, every: list[dict[str, np.ndarray]]) -> None:
    """One file for each sample."""
    folder.mkdir()
    for number, sample in enumerate(every):
        np.savez(folder / f"{number}.npz", **sample)  # type: ignore[arg-type]


if __name__ == "__main__":
    raise SystemExit(main())
