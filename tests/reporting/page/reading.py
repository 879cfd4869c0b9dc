"""Reads the data of a page back."""

from __future__ import annotations

import json
import re
from typing import Any


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    document: dict[str, Any] = json.loads(text)
    return document


def plans_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Fingerprint -> the plan's values by their names."""
    plans = (dict(zip(document["plan_fields"], row, strict=True)) for row in document["plans"])
    return {plan["plan"]: plan for plan in plans}
