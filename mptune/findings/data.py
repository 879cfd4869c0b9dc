"""Findings about the samples."""

from __future__ import annotations

from mptune.findings.wording import Table, Values, Words, percent

DATA = Table()


@DATA.row("random-data", "warning", "no samples were given, and mptune drew random numbers")
def _random_data(v: Values) -> Words:
    text = "random inputs: no calibration data was given, and errors on noise say little about real inputs"
    return Words(text, "give --data")


@DATA.row("constant-data", "warning", "an input has one constant value in all samples")
def _constant_data(v: Values) -> Words:
    cure = "give real inputs with --data: constant inputs do not exercise the network"
    return Words(f"every value of input {v.input!r} is {v.value:g} in all samples", cure)


@DATA.row("duplicate-samples", "warning", "the same sample occurs more than once")
def _duplicate_samples(v: Values) -> Words:
    text = f"{v.duplicates} of {v.samples} samples equal an earlier one: the held-out error may be too small"
    return Words(text, "give different samples; copy a buffer that is reused")


@DATA.row("too-few-samples", "warning", "too few samples to hold any out")
def _too_few_samples(v: Values) -> Words:
    text = "one sample only: the held-out error is taken on the sample that the search saw"
    return Words(text, "give 2 or more samples")


@DATA.row("data-do-not-fit", "warning", "activations before a BatchNorm are far from its running mean")
def _data_do_not_fit(v: Values) -> Words:
    if v.kind == "norm":
        more = f", and before {v.more} more" if v.get("more") else ""
        return Words(
            f"activations before this BatchNormalization are {v.standard_deviations:.3g} of its standard deviations"
            f" from its running mean (median over the channels){more}: the data are not prepared as in training",
            "scale, normalise and order the channels of the inputs as in training; data as in training stay below 0.1",
        )
    left = f"{percent(v.left_share)} of the difference is left"
    left += "" if v.is_exact else f", rounding would leave {percent(v.rounding_share)}: the cause is probably similar"
    where = f"of {v.tried} samples that were tried" if v.samples == v.tried else f"of {v.tried}: samples {v.shown}"
    return Words(
        f"the model gives what was recorded {v.words} ({left}, on {v.samples} {where}): precision is not the problem",
        "feed both sides the same way: channels, range and layout as in training, each input by its name, written"
        " before each run on the stream of the run",
    )


@DATA.row("one-sample-decides", "warning", "one sample's error is far above that of the rest")
def _one_sample_decides(v: Values) -> Words:
    text = f"plan {v.plan}: sample {v.sample} of the data has an error of {v.error:.1e}, the others"
    cure = "check this sample; if it is valid, add similar ones"
    return Words(f"{text} {v.median_of_others:.1e} (median)", cure)


@DATA.row("held-out-differs", "warning", "the held-out error is far above the error that the search saw")
def _held_out_differs(v: Values) -> Words:
    text = f"plan {v.plan}: the held-out error is {v.held_out:.1e}, that of the search samples {v.search:.1e}"
    return Words(text, "give more samples, of every kind that the model will meet")
