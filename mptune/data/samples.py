"""Calibration samples once they are checked: their identity, their split, what is doubtful about them, and rollouts.

In a rollout outputs are fed back as inputs over recorded sequences, so that errors add up as they do in use. A sequence
is ``steps`` consecutive samples. Its first step takes the recorded state, later ones what the model itself gave; all
other inputs are the recorded ones. The outputs of a sequence are those of its last step, and those of the fed-back
outputs after a quarter and half of it, as ``NAME after K steps``, so that every error shows how it grew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mptune.data.arrays import Inputs
from mptune.errors import SettingsError
from mptune.finding import Finding, Where
from mptune.settings import ShapeRange

Feed = Mapping[str, np.ndarray]  # one sample: every input of the model by name
Run = Callable[[Feed], Mapping[str, np.ndarray]]  # one run of the model: inputs to outputs
# Makes several runs, at once or one after another, and gives their outputs in order.
RunAll = Callable[[Sequence[Callable[[], Mapping[str, np.ndarray]]]], Sequence[Mapping[str, np.ndarray]]]

_MOST_READ = 64  # samples that are looked at, evenly spaced, where each is read from a file when it is needed
# A vector may well hold one number; images, sounds, sequences and feature maps do not.
_MIN_VALUES, _MIN_RANK = 1024, 3


@dataclass(frozen=True, eq=False)
class LazySamples(Sequence[Feed]):
    """Samples of any total size: each is read and checked anew when it is asked for.

    ``digests`` has a hash of each: equal for equal samples. It may stand for the files that they are made from.
    """

    read: Callable[[int], Feed]
    digests: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, index: Any) -> Any:
        chosen = range(len(self))[index]
        return self.read(chosen) if isinstance(chosen, int) else tuple(map(self.read, chosen))


def digests_of(samples: Sequence[Feed]) -> Sequence[bytes]:
    """SHA-256 of each sample: of names, types, shapes and values; of images that of their files."""
    if isinstance(samples, LazySamples):
        return samples.digests
    digests = [hashlib.sha256() for _ in samples]
    for digest, sample in zip(digests, samples, strict=True):
        for name, array in sorted(sample.items()):
            digest.update(f"{name}\n{array.dtype.str}\n{array.shape}\n".encode())
            digest.update(array.tobytes())
    return [digest.digest() for digest in digests]


@dataclass(frozen=True)
class CalibrationSet:
    """Checked samples: every graph input by name, in the model's types and shapes."""

    samples: Sequence[Feed]
    source: str
    is_random: bool = False
    warnings: tuple[str, ...] = ()  # that have no code, one line each; they stay with the run
    findings: tuple[Finding, ...] = ()
    indices: tuple[int, ...] = ()  # of each sample in the data, 0-based, where these are a part of them; else empty
    preprocessing: Mapping[str, Any] | None = None  # how images became inputs (``mptune.data.images``)

    def split(
        self, seed: int, held_out_fraction: float, max_search: int | None, steps: int = 1
    ) -> tuple[CalibrationSet, CalibrationSet]:
        """Split by seed into search samples and held-out samples (``split_indices``).

        With ``steps`` whole sequences of consecutive samples are split, and a rest is left out. A single sample or
        sequence is both parts, and a finding says so.
        """
        count = len(self.samples) // steps
        findings = self.findings
        if count < 2:
            findings += (Finding.from_code("too-few-samples", "search", Where(), {"samples": count}),)

        def part(chosen: Sequence[int]) -> CalibrationSet:
            indices = tuple(first * steps + k for first in chosen for k in range(steps))
            return replace(self, samples=tuple(self.samples[k] for k in indices), findings=findings, indices=indices)

        search, held_out = split_indices(count, seed, held_out_fraction, max_search)
        return part(search), part(held_out)

    def sha256(self) -> str:
        """The identity of the data: of all samples in their order; of images their files and how they are read."""
        return hashlib.sha256(b"".join(digests_of(self.samples))).hexdigest()


def split_indices(
    count: int, seed: int, held_out_fraction: float, max_search: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which of ``count`` samples are search samples, and which are held out.

    With two or more samples the parts are disjoint, sorted, not empty, and of at most ``max_search`` samples each.
    """
    if count < 2:
        return tuple(range(count)), tuple(range(count))
    held = min(max(round(count * held_out_fraction), 1), count - 1)
    order = np.random.default_rng(seed).permutation(count)
    search, held_out = (tuple(sorted(map(int, part[:max_search]))) for part in (order[held:], order[:held]))
    return search, held_out


def data_findings(samples: Sequence[Feed], states: Collection[str] = ()) -> tuple[Finding, ...]:
    """What is wrong with samples as calibration data: constant inputs, unless another one varies; duplicates.

    ``states`` are inputs that hold a recurrent state, which may well start as one number in every sample.
    """
    looked_at = _looked_at(samples)
    findings: list[Finding] = []
    for name, example in looked_at[0].items() if looked_at else ():
        arrays = [sample[name] for sample in looked_at]
        if example.dtype.kind != "f" or example.ndim < _MIN_RANK or sum(array.size for array in arrays) < _MIN_VALUES:
            continue
        value = next(array for array in arrays if array.size).flat[0]
        if not all((array == value).all() for array in arrays):
            findings = []
            break
        if name not in states:
            evidence = {"value": float(value), "samples": len(looked_at)}
            findings.append(Finding.from_code("constant-data", "search", Where(inputs=(name,)), evidence))
    first: dict[bytes, int] = {}
    repeated = tuple(k for k, digest in enumerate(digests_of(samples)) if first.setdefault(digest, k) != k)
    if repeated:
        evidence = {"samples": len(samples), "duplicates": len(repeated)}
        findings.append(Finding.from_code("duplicate-samples", "search", Where(samples=repeated), evidence))
    return tuple(findings)


def size_findings(samples: Sequence[Feed], inputs: Inputs, shapes: Sequence[ShapeRange] = ()) -> tuple[Finding, ...]:
    """Whether all samples have one size, though inputs have dynamic axes beside the batch.

    ``shapes`` are those that an engine is built for: an input of which they allow one is never fed another.
    """
    settled = {shape.name for shape in shapes if shape.smallest == shape.largest}
    # Axes that share a name have one size: that of the batch, or of an input that is settled.
    bound = {info.shape[0] for info in inputs if info.shape}
    bound |= {dim for info in inputs if info.name in settled for dim in info.shape or ()}
    axes = [
        (info.name, k)
        for info in inputs
        for k, dim in enumerate(info.shape or ())
        if k and info.name not in settled and not isinstance(dim, int) and (not dim or dim not in bound)
    ]
    looked_at = _looked_at(samples)
    if not axes or len({tuple(sample[name].shape[k] for name, k in axes) for sample in looked_at}) > 1:
        return ()
    names = tuple(dict.fromkeys(name for name, _ in axes))
    size = ", ".join(f"{name} {'x'.join(map(str, looked_at[0][name].shape))}" for name in names)
    return (Finding.from_code("one-size-tried", "search", Where(inputs=names), {"size": size}),)


def _looked_at(samples: Sequence[Feed]) -> Sequence[Feed]:
    if not isinstance(samples, LazySamples):
        return samples
    numbers = np.linspace(0, len(samples) - 1, min(_MOST_READ, len(samples))).astype(int)
    return tuple(samples[int(k)] for k in dict.fromkeys(numbers))


@dataclass(frozen=True)
class Rollout:
    """Which outputs are fed back to which inputs, and over how many steps."""

    pairs: tuple[tuple[str, str], ...]
    steps: int

    @classmethod
    def parse(
        cls, texts: Sequence[str], steps: int | None, inputs: Sequence[str], outputs: Sequence[str], samples: int
    ) -> Rollout | None:
        """Read ``OUTPUT:INPUT`` texts, in which names may hold colons; None where nothing is fed back."""
        if not texts:
            if steps is not None:
                hint = "write --feedback OUTPUT:INPUT, once for each state, and --steps for the length of a sequence"
                raise SettingsError(f"is {steps}, and nothing is fed back", hint, setting="steps")
            return None
        named = {f"{output}:{name}": (output, name) for output in outputs for name in inputs}
        pairs: dict[str, str] = {}
        for text in texts:
            if text not in named:
                hint = f"its outputs are {', '.join(map(repr, outputs))}; its inputs {', '.join(map(repr, inputs))}"
                raise SettingsError(f"{text}: the model has no such OUTPUT:INPUT", hint, setting="feedback")
            output, name = named[text]
            if name in pairs:
                raise SettingsError(f"feeds input {name!r} twice", "give each input once", setting="feedback")
            pairs[name] = output
        wanted = samples if steps is None else steps
        if not 2 <= wanted <= samples:
            hint = f"give 2 to {samples}: one step feeds nothing back"
            raise SettingsError(f"{wanted}: the data hold {samples} samples", hint, setting="steps")
        return cls(tuple((output, name) for name, output in pairs.items()), wanted)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The steps before the last after which the fed-back outputs are compared, too."""
        return tuple(sorted({k for k in (self.steps // 4, self.steps // 2) if 0 < k < self.steps}))


def outputs_of(
    run: Run, samples: Sequence[Feed], rollout: Rollout | None, run_all: RunAll | None = None
) -> list[dict[str, np.ndarray]]:
    """The outputs of every sample, or of every whole sequence of samples; ``run_all`` makes several single runs."""
    if rollout is None:
        runs = [partial(run, sample) for sample in samples]
        return [dict(outputs) for outputs in (run_all(runs) if run_all else (each() for each in runs))]
    results = []
    for start in range(0, len(samples) - rollout.steps + 1, rollout.steps):
        state: dict[str, np.ndarray] = {}
        earlier: dict[str, np.ndarray] = {}
        for step, sample in enumerate(samples[start : start + rollout.steps], start=1):
            outputs = run({**sample, **state})
            for output, name in rollout.pairs:
                # The output as the input takes it: its type, and its shape where only axes of 1 differ.
                shape = sample[name].shape if outputs[output].size == sample[name].size else outputs[output].shape
                state[name] = np.ascontiguousarray(outputs[output].reshape(shape), dtype=sample[name].dtype)
            if step in rollout.checkpoints:
                earlier |= {f"{output} after {step} steps": np.array(outputs[output]) for output, _ in rollout.pairs}
        results.append({name: np.array(array) for name, array in outputs.items()} | earlier)
    return results
