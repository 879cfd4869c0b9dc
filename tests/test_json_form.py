"""Numbers survive JSON."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptune.json_form import decode_float, encode_float


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_float_survives_standard_json(value: float) -> None:
    text = json.dumps(encode_float(value), allow_nan=False)
    back = decode_float(json.loads(text))
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_numpy_scalars_become_plain_floats() -> None:
    assert type(encode_float(np.float32(0.5))) is float
    assert encode_float(np.float64("-inf")) == "-inf"


def test_integers_decode_as_floats() -> None:
    assert type(decode_float(3)) is float


def test_other_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="'Infinity' is not a number"):
        decode_float("Infinity")
