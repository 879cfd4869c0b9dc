"""``compare --extract``: the group that makes a difference as a model of its own, to be sent to others."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from mptune.data.archive import write_arrays
from mptune.diagnosis.comparing import Comparison
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import Sides
from mptune.diagnosis.structure import align
from mptune.errors import RunError
from mptune.files import write_text, writing
from mptune.graph.writing.variants import write_widened, write_with_outputs

_BY_CODE = ("first-difference", "attribute-differs", "precision")  # the surest place first
_MOST_SAMPLES = 4
_TOLERANCE = 1e-3  # at most, of the group's own outputs: about twice what one rounding to FP16 makes

_SHOW = """\
#!/bin/sh
# Group {group}: {text}
# inputs/ and expected/ have one file for each of the samples {samples}: what the group reads and gives in FP32.
set -e
cd "$(dirname "$0")"
{commands}
# An engine of candidate.onnx (trtexec --stronglyTyped): mptune compare model.onnx --data inputs --outputs FILE
"""


def extract(comparison: Comparison, sides: Sides, right: object, folder: Path) -> str:
    """Write the group that a comparison blames, with its inputs and outputs in FP32; returns what to run, in a line.

    Where ``right`` runs the candidate, an ONNX model, its nodes are cut out, too. Nothing is written where no finding
    names a group; RunError: the folder exists.
    """
    blamed = [f for code in _BY_CODE for f in comparison.findings if f.code == code and f.where.groups]
    if not blamed:
        return "nothing: no finding names a group; of two models, --trace looks for the first one"
    runner, model = sides.runner, sides.runner.model
    group = next(each for each in runner.grouped.groups if each.id == blamed[0].where.groups[0])
    nodes = [node for node in model.nodes if node.name in group.nodes]
    computed = [name for node in nodes for name in node.outputs if name]
    others = [name for node in model.nodes if node not in nodes for name in (*node.inputs, *node.captures)]
    outputs = [name for name in computed if name in {*others, *(output.name for output in model.outputs)}]
    read = dict.fromkeys(name for node in nodes for name in (*node.inputs, *node.captures))
    inputs = [name for name in read if name and name not in computed and name not in model.initializers]

    # What the model in FP32 has there, on the samples whose outputs differ most.
    worst = max(sides.outputs, key=lambda side: side.excess)
    errors = np.array(worst.errors.per_output[worst.name]["relative_l2"])
    samples = sorted(np.argsort(-errors, kind="stable")[:_MOST_SAMPLES].tolist())
    inside = [name for name in (*inputs, *outputs) if name in model.producer]
    path = write_widened(model, runner.context.bank, runner.context.scratch("extracted"), inside)
    runs = [{**feed, **run} for feed, run in zip(runner.samples, runner.run("extracted", path), strict=True)]

    with writing(folder):
        if folder.exists():
            raise RunError(f"{folder} exists already", "give --extract a folder that is not there yet")
        folder.mkdir(parents=True)
    write_with_outputs(model, None, folder / "model.onnx", outputs, inputs)
    for number, sample in enumerate(samples):
        for name, those in (("inputs", inputs), ("expected", outputs)):
            arrays = {each: np.asarray(runs[sample][each], model.info(each).numpy_dtype) for each in those}
            write_arrays(folder / name / f"{number}.npz", arrays)
    commands = ["mptune apply model.onnx --fp16-all --force -o candidate.onnx"]
    if isinstance(right, Runner):
        theirs = dict(zip([i.name for i in model.inputs], [i.name for i in right.model.inputs], strict=False))
        theirs |= {info.name: info.name for info in right.model.inputs} | dict(align(model, right.model).values)
        if {*inputs, *outputs} <= theirs.keys():
            commands, pair = [], ([theirs[name] for name in names] for names in (outputs, inputs))
            write_with_outputs(right.model, None, folder / "candidate.onnx", *pair)
    tolerance = _TOLERANCE if worst.limit.is_absolute else min(_TOLERANCE, worst.limit.value)
    tolerances = [f"--tolerance {shlex.quote(f'{name}={tolerance:.3g}')}" for name in outputs]
    commands.append(" ".join(["mptune compare model.onnx candidate.onnx --data inputs", *tolerances]))
    name, words = f"{group.name} ({group.id})", {"text": blamed[0].text, "samples": samples}
    write_text(folder / "show.sh", _SHOW.format(group=name, commands="\n".join(commands), **words))
    return f"group {name}: sh {shlex.quote(str(folder / 'show.sh'))} shows the difference"
