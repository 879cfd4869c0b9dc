"""Findings about the samples."""

from __future__ import annotations

from collections.abc import Mapping

from mptune.findings.wording import AT, CodeInfo, Wording, row

_LEFT = (
    "{left_share:.2g%} of the difference is left, on {explained}[; not on the other {others} of {tried} that were"
    " tried][; {differing} of {count} {number:/differs/differ}]"
)
_OTHER_FEEDS = {
    "prepared": (
        "the samples are prepared in another way there",
        "prepare the samples as in training on both sides: channels, range, layout",
    ),
    "mixed up": ("the inputs are mixed up there", "give each input by its name, and a buffer of its own"),
    "not written": (
        "as if that input were not written before each run there",
        "write it before each run, on the stream of the run, into a buffer that no other run uses",
    ),
}
"""How a deployment feeds the samples otherwise: what that means, and what to do."""

DATA: Mapping[str, CodeInfo] = {
    "random-data": row(
        "warning",
        "no samples were given, and mptune drew random numbers",
        "random inputs: no calibration data was given, so every error here is the error on noise, and real inputs can"
        " differ by far",
        "give --data",
    ),
    "constant-data": row(
        "warning",
        "an input is the same everywhere in all samples",
        "every value of input {input!r} is {value:g} in all samples",
        "give real inputs with --data: constants show nothing of what the network computes",
    ),
    "duplicate-samples": row(
        "warning",
        "the same sample is there more than once",
        "{duplicates} of {samples} samples equal an earlier one, so the held-out error may be taken on samples"
        " that the search saw",
        "give different samples; if one buffer was filled for each of them, keep copies of it",
    ),
    "too-few-samples": row(
        "warning",
        "too few samples to hold any out",
        "one sample only: the held-out error is taken on the sample that the search saw",
        "give 2 or more samples",
    ),
    "data-do-not-fit": CodeInfo(
        "warning",
        "activations before a BatchNorm lie far off its running mean",
        {
            "norm": Wording(
                "activations before this BatchNormalization lie {standard_deviations:.3g} of its standard deviations"
                " off its running mean (median over the channels)[, and before {more} more]: the data are not prepared"
                " as in training",
                "scale, normalise and order the channels of the inputs as in training; data as in training stay below"
                " 0.1",
                at=AT,
            ),
            **{
                f"{kind}{near}": Wording(text.format(left=_LEFT, meaning=meaning), cure)
                for kind, (meaning, cure) in _OTHER_FEEDS.items()
                for near, text in {
                    "": "the model gives what was recorded {{words}} ({left}): {meaning}; precision is not the problem",
                    " nearly": "the model comes near to what was recorded {{words}} ({left}; rounding would leave"
                    " {{rounding_share:.2g%}}): perhaps {meaning}, in this way or a similar one",
                }.items()
            },
        },
    ),
    "one-sample-decides": row(
        "warning",
        "one sample's error is far above that of the rest",
        "plan {plan}: sample {sample} of the data has an error of {error:.1e}, the others"
        " {median_of_others:.1e} (median)",
        "look at this sample; where it is as it should be, give more like it",
    ),
    "held-out-differs": row(
        "warning",
        "the held-out error is far above the error that the search saw",
        "plan {plan}: the held-out error is {held_out:.1e}, that of the search samples {search:.1e}",
        "give more samples, of every kind that the model meets, so that the search sees what they show",
    ),
}
