"""The lines with which ``chosen/infer.py`` reads images: those that made the calibration data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from pprint import pformat
from typing import Any

from mptune.data.forms.image_lines import fit_image, image_input
from mptune.data.forms.images import PREPROCESS_JSON, SUFFIXES
from mptune.files import parse_json

READ_IMAGES = """    if Path(path).suffix.lower() not in (".npz", ".npy"):
        return read_images(path)
"""
"""Where the script has a path: it is that of an image, or of a folder of them."""

_READER = '''
def read_images(path):
    """One image, or all of a folder in the order of their paths, as the model's only input."""
    path = Path(path)
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES) if path.is_dir() else [path]
    if not files:
        sys.exit(f"error: {path} holds no images\\nhint: their names end in {', '.join(IMAGES)}")
    rows = []
    for file in files:
        try:
            rows.append(image_input(file, PREPROCESS))
        except ImportError:
            sys.exit("error: images need Pillow\\nhint: pip install pillow")
        except (OSError, ValueError) as error:
            sys.exit(f"error: cannot read {file}: {error}\\nhint: give an image, a folder of images, or an .npz")
    return {PREPROCESS["input"]: np.concatenate(rows)}


'''


def load_preprocessing(data_dir: Path) -> Mapping[str, Any] | None:
    """The declaration that a run keeps; None where its data were no images."""
    try:
        document = parse_json((data_dir / PREPROCESS_JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and "input" in document else None


def image_reader(preprocessing: Mapping[str, Any]) -> str:
    """Python source: the declaration, and functions that turn images into the model's input with it."""
    functions = "\n\n".join(
        inspect.getsource(one).replace(": Any", "").replace(" -> Any", "") for one in (fit_image, image_input)
    )
    declared = pformat(dict(preprocessing), width=110, sort_dicts=False)
    return (
        "# How an image becomes the input, as it was declared for the calibration data.\n"
        f"PREPROCESS = {declared}\nIMAGES = {tuple(sorted(SUFFIXES))!r}\n\n\n{functions}\n{_READER}"
    )
