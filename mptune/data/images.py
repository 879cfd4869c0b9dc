"""A folder of images, and ``preprocess.toml``, which says how an image becomes the model's only input.

``--data`` takes the folder, or the file of the declaration. Nothing is guessed: without a declaration it is an error.
docs/reference/files.md (*Images*) has the table of its keys.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from pprint import pformat
from typing import Annotated, Any, Literal

import numpy as np
import pydantic

from mptune.data.arrays import Inputs, cut_samples
from mptune.data.samples import CalibrationSet, Feed, LazySamples
from mptune.errors import DataError
from mptune.files import read_bytes, read_json
from mptune.resources import read_toml

# In the run's data directory: the declaration with what the model says of it, as ``image_input`` takes it.
PREPROCESS_JSON = "preprocess.json"
IMAGES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


class _Declared(pydantic.BaseModel):
    """The content of ``preprocess.toml``."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    size: tuple[int, int] | None = None
    resize: Literal["stretch", "crop", "letterbox", "none"] = "stretch"
    shorter: int | None = pydantic.Field(default=None, gt=0)
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bilinear"
    pad: int = pydantic.Field(default=114, ge=0, le=255)
    layout: Literal["NCHW", "NHWC"] | None = None
    colour: Literal["RGB", "BGR", "GREY"] = "RGB"
    scale: float | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[Annotated[float, pydantic.Field(gt=0)], ...] = (1.0,)
    input: str | None = None
    folder: str | None = None


def load_images(declaration: Path, inputs: Inputs, batch: int) -> CalibrationSet:
    """The images of a folder as samples that are read when they are needed."""
    example = 'such as: size = [224, 224]; resize = "crop"; mean = [0.485, 0.456, 0.406]; std = [0.229, 0.224, 0.225]'
    declared = read_toml(declaration, _Declared, DataError, example)
    # The declaration with what the model says: layout, size and type.
    info = inputs[0]
    shape = info.shape if len(inputs) == 1 and declared.input in (None, info.name) else None
    if shape is None or len(shape) != 4:
        name = "" if declared.input is None else f" {declared.input}"
        text = f"images are for a model with one input{name} of rank 4"
        raise DataError(f"{declaration}: {text}", "write .npz files with one array per input")
    channels = 1 if declared.colour == "GREY" else 3
    fitting = [layout for layout, axis in (("NCHW", 1), ("NHWC", 3)) if shape[axis] == channels]
    layout = declared.layout or (fitting[0] if len(fitting) == 1 else None)
    size = declared.size or (shape[2:] if layout == "NCHW" else shape[1:3])
    if layout is None or not all(isinstance(dim, int) and dim > 0 for dim in size):
        text = f"input {info.name!r} does not say which axis holds the {channels} channels, or which size images have"
        hint = 'declare layout = "NCHW" or "NHWC", colour, and size = [HEIGHT, WIDTH]'
        raise DataError(f"{declaration}: {text}", hint)
    if {len(declared.mean), len(declared.std)} - {1, channels}:
        text = f"mean has {len(declared.mean)} numbers, std {len(declared.std)}"
        raise DataError(f"{declaration}: {text}", f"give 1 or {channels}")
    scale = (1 / 255 if info.numpy_dtype.kind == "f" else 1.0) if declared.scale is None else declared.scale
    spec = declared.model_dump(mode="json", exclude={"input", "folder"})
    spec |= {"size": list(size), "layout": layout, "scale": scale, "dtype": info.numpy_dtype.name}
    folder = declaration.parent / (declared.folder or ".")
    files = image_files(folder) if folder.is_dir() else []
    rows = shape[0] if isinstance(shape[0], int) else batch
    count, rest = divmod(len(files), rows)
    if not count:
        text = f"{folder} holds {len(files)} images, and one sample takes {rows}"
        raise DataError(text, f"images end in {', '.join(IMAGES)}")
    files_of = [files[k * rows : (k + 1) * rows] for k in range(count)]

    def read(index: int) -> Feed:
        images = []
        for file in files_of[index]:
            try:
                images.append(image_input(file, spec))
            except ImportError:
                raise DataError("images need Pillow, which is not installed", "pip install pillow") from None
            except Exception as error:  # Pillow raises nearly anything for a damaged file
                text = f"{file} cannot be read as an image: {' '.join(str(error).split())}"
                raise DataError(text, "remove it, or declare its size") from None
        return cut_samples({info.name: np.concatenate(images)}, inputs, rows, files_of[index][0].name)[0][0]

    read(0)  # a declaration that does not fit is an error at once
    hashes = ([hashlib.sha256(read_bytes(file)).digest() for file in sample] for sample in files_of)
    declared_bytes = repr(sorted(spec.items())).encode()
    return CalibrationSet(
        LazySamples(read, [hashlib.sha256(b"".join((declared_bytes, *each))).digest() for each in hashes]),
        declaration.parent.resolve().name,
        warnings=(f"{rest} images are left over: one sample takes {rows}",) if rest else (),
        preprocessing={**spec, "input": info.name},
    )


# ``chosen/infer.py`` holds the lines of these three functions, too: they need NumPy and Pillow alone.


def image_files(path: Any) -> Any:
    """All images of a folder in the order of their paths; a path that is no folder itself."""
    return sorted(f for f in path.rglob("*") if f.suffix.lower() in IMAGES and f.is_file()) if path.is_dir() else [path]


def fit_image(image: Any, spec: Any) -> Any:
    """A Pillow image of the declared colours and size."""
    from PIL import Image

    image = image.convert("L" if spec["colour"] == "GREY" else "RGB")
    height, width = spec["size"]
    resample = getattr(Image.Resampling, spec["interpolation"].upper())
    if spec["resize"] == "stretch":
        return image.resize((width, height), resample)
    if spec["resize"] == "crop":
        shorter = spec["shorter"] or min(height, width)
        factor = max(shorter / min(image.size), height / image.height, width / image.width)
        size = max(width, round(image.width * factor)), max(height, round(image.height * factor))
        image = image.resize(size, resample)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))
    if spec["resize"] == "letterbox":
        factor = min(width / image.width, height / image.height)
        small = image.resize((max(1, round(image.width * factor)), max(1, round(image.height * factor))), resample)
        grey = spec["pad"] if spec["colour"] == "GREY" else (spec["pad"],) * 3
        whole = Image.new(small.mode, (width, height), grey)
        whole.paste(small, ((width - small.width) // 2, (height - small.height) // 2))
        return whole
    if (image.height, image.width) != (height, width):
        raise ValueError(f"it is {image.height}x{image.width}, {height}x{width} is declared")
    return image


def image_input(path: Any, spec: Any) -> Any:
    """One row of the model's input, shape (1, C, H, W) or (1, H, W, C)."""
    from PIL import Image

    with Image.open(path) as image:
        values = np.asarray(fit_image(image, spec), np.float32)
    values = values[..., None] if values.ndim == 2 else values
    if spec["colour"] == "BGR":
        values = values[..., ::-1]
    values = (values * np.float32(spec["scale"]) - np.float32(spec["mean"])) / np.float32(spec["std"])
    values = values.transpose(2, 0, 1) if spec["layout"] == "NCHW" else values
    return np.ascontiguousarray(values[None]).astype(spec["dtype"])


def load_preprocessing(data_dir: Path) -> Mapping[str, Any] | None:
    """The declaration that a run keeps; None where its data were no images."""
    try:
        document = read_json(data_dir / PREPROCESS_JSON)
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and "input" in document else None


def image_reader(preprocessing: Mapping[str, Any]) -> str:
    """Python source: the declaration, and functions that turn images into the model's input with it."""
    functions = "\n\n".join(inspect.getsource(each) for each in (image_files, fit_image, image_input))
    declared = pformat(dict(preprocessing), width=110, sort_dicts=False)
    return (
        "# How an image becomes the input, as it was declared for the calibration data.\n"
        f"PREPROCESS = {declared}\nIMAGES = {IMAGES}\n\n\n"
        f"{functions.replace(': Any', '').replace(' -> Any', '')}\n\n"
    )
