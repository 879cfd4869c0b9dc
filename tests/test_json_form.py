"""Numbers survive JSON, and dataclasses with those that are not finite."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptune.json_form import JsonForm, decode_float, encode_float


@dataclass(frozen=True)
class Named(JsonForm):
    name: str
    value: float


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_float_survives_standard_json(value: float) -> None:
    text = json.dumps(Named("x", value).to_json(), allow_nan=False)
    read = Named.from_json(json.loads(text)).value
    for back in (read, decode_float(encode_float(value))):
        assert back == value or (math.isnan(back) and math.isnan(value))


def test_numpy_scalars_become_plain_floats() -> None:
    assert type(encode_float(np.float32(0.5))) is type(decode_float(3)) is float
    assert encode_float(np.float64("-inf")) == "-inf"


@pytest.mark.parametrize("document", [None, [], {"name": "x"}, {"name": 1, "value": 1.0}, {"name": "x", "value": []}])
def test_what_has_another_form_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match="validation error"):
        Named.from_json(document)
