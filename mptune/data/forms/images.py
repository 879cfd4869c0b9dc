"""A folder of images, with a declaration of how an image becomes the model's input: ``preprocess.toml`` beside them.

    size = [224, 224]              # height, width; left out: the model's own
    resize = "crop"                # stretch (default), crop (scale the shorter side, cut the middle), letterbox, none
    shorter = 256                  # crop: the shorter side before the middle is cut; left out: that of size
    interpolation = "bilinear"     # or nearest, bicubic: Pillow's, which smooths where it makes smaller
    pad = 114                      # letterbox: grey level of the border
    layout = "NCHW"                # or NHWC; left out: by the model's channels
    colour = "RGB"                 # or BGR, GREY
    scale = 0.00392156862745098    # value * scale; by default 1/255, for integer inputs 1; then (value - mean) / std
    mean = [0.485, 0.456, 0.406]
    std = [0.229, 0.224, 0.225]
    input = "images"               # the model's only input, where its name is to be checked
    folder = "val"                 # where the images lie, if not beside this file

``--data`` takes the folder, or the file of the declaration. Nothing is guessed: without a declaration it is an error.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pydantic

from mptune.data.checks import check_sample_shape, check_values
from mptune.data.forms.samples import CalibrationSet, Feed, LazySamples
from mptune.errors import DataError
from mptune.files import read_json
from mptune.resources import read_toml

if TYPE_CHECKING:
    from mptune.graph.loading.tensors import TensorInfo

PREPROCESS_TOML = "preprocess.toml"

PREPROCESS_JSON = "preprocess.json"
"""In the run's data directory: the declaration with what the model says of it, as ``image_input`` takes it."""

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})

_EXAMPLE = 'such as: size = [224, 224]; resize = "crop"; mean = [0.485, 0.456, 0.406]; std = [0.229, 0.224, 0.225]'


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
    std: tuple[float, ...] = (1.0,)
    input: str | None = None
    folder: str | None = None

    @pydantic.field_validator("std")
    @classmethod
    def _is_no_zero(cls, std: tuple[float, ...]) -> tuple[float, ...]:
        if not all(value > 0 for value in std):
            raise ValueError("every number must be above 0")
        return std


def declaration_of(path: Path) -> Path | None:
    """The declaration of a folder of images, or of a ``.toml`` file itself; None where there is none."""
    if path.suffix.lower() == ".toml":
        return path
    beside = path / PREPROCESS_TOML
    return beside if path.is_dir() and beside.is_file() else None


def has_images(folder: Path) -> bool:
    """Whether files in a folder have names of images."""
    return any(file.suffix.lower() in SUFFIXES for file in folder.iterdir())


def load_images(declaration: Path, inputs: Sequence[TensorInfo], batch: int) -> CalibrationSet:
    """The images of a folder as samples that are read when they are needed."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise DataError("images need Pillow, which is not installed", "pip install pillow") from None
    declared = read_toml(declaration, _Declared, DataError, _EXAMPLE)
    info = _input(declared, inputs, declaration)
    spec = _settled(declared, info, declaration)
    folder = declaration.parent / (declared.folder or ".")
    if not folder.is_dir():
        raise DataError(f"{declaration}: there is no folder {folder}", "folder is relative to the file")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    rows = info.shape[0] if info.shape and isinstance(info.shape[0], int) else batch
    if len(files) < rows:
        raise DataError(
            f"{folder} holds {len(files)} images, and one sample takes {rows}", f"images end in {', '.join(SUFFIXES)}"
        )
    rest = len(files) % rows
    warnings = (f"{rest} images are left over: one sample takes {rows}",) if rest else ()
    samples = _Images(files[: len(files) - rest], rows, info, spec, batch)
    samples.read(0)  # a declaration that does not fit is an error at once
    names = tuple(file.relative_to(folder).as_posix() for file in files) if rows == 1 else ()
    source, preprocessing = declaration.parent.resolve().name, {**spec, "input": info.name}
    return CalibrationSet(samples, source, warnings=warnings, preprocessing=preprocessing, names=names)


class _Images(LazySamples):
    def __init__(self, files: Sequence[Path], rows: int, info: TensorInfo, spec: Mapping[str, Any], batch: int) -> None:
        self._files, self._rows, self._info, self._spec, self._batch = files, rows, info, spec, batch

    def __len__(self) -> int:
        return len(self._files) // self._rows

    def read(self, index: int) -> Feed:
        rows = [self._row(file) for file in self._files_of(index)]
        where = self._files_of(index)[0].name
        array = check_values(self._info, np.concatenate(rows), where)
        check_sample_shape(self._info, array, self._batch, where)
        return {self._info.name: array}

    def _row(self, file: Path) -> Any:
        try:
            return image_input(file, self._spec)
        except Exception as error:  # Pillow raises nearly anything for a damaged file
            text = " ".join(str(error).split())
            raise DataError(f"{file} cannot be read as an image: {text}", "remove it, or declare its size") from None

    def _files_of(self, index: int) -> Sequence[Path]:
        return self._files[index * self._rows : (index + 1) * self._rows]

    def digests(self) -> Sequence[bytes]:
        declared = repr(sorted(self._spec.items())).encode()
        digests = []
        for index in range(len(self)):
            digest = hashlib.sha256(declared)
            for file in self._files_of(index):
                digest.update(hashlib.sha256(file.read_bytes()).digest())
            digests.append(digest.digest())
        return digests


def _input(declared: _Declared, inputs: Sequence[TensorInfo], declaration: Path) -> TensorInfo:
    if len(inputs) != 1:
        names = ", ".join(info.name for info in inputs)
        raise DataError(
            f"{declaration}: images are for a model with one input, this one has {len(inputs)}: {names}",
            "write .npz files with one array per input",
        )
    if declared.input not in (None, inputs[0].name):
        raise DataError(f"{declaration}: the model has no input {declared.input!r}", f"its input is {inputs[0].name!r}")
    return inputs[0]


def _settled(declared: _Declared, info: TensorInfo, declaration: Path) -> dict[str, Any]:
    """The declaration with what the model says: layout, size and type."""
    shape = info.shape
    if shape is None or len(shape) != 4:
        raise DataError(
            f"{declaration}: input {info.name!r} has no rank 4, so it takes no images", "write .npz files instead"
        )
    channels = 1 if declared.colour == "GREY" else 3
    fitting = [layout for layout, axis in (("NCHW", 1), ("NHWC", 3)) if shape[axis] == channels]
    layout = declared.layout or (fitting[0] if len(fitting) == 1 else None)
    if layout is None:
        raise DataError(
            f"{declaration}: which axis of input {info.name!r} holds the {channels} channels is not known",
            'declare layout = "NCHW" or "NHWC", and colour',
        )
    own = shape[2:] if layout == "NCHW" else shape[1:3]
    size = declared.size or tuple(own)
    if not all(isinstance(dim, int) and dim > 0 for dim in size):
        raise DataError(f"{declaration}: the model leaves the size open", "declare it: size = [HEIGHT, WIDTH]")
    for name, values in (("mean", declared.mean), ("std", declared.std)):
        if len(values) not in (1, channels):
            raise DataError(f"{declaration}: {name} has {len(values)} numbers", f"give 1 or {channels}")
    by_default = 1 / 255 if info.numpy_dtype.kind == "f" else 1.0
    return {
        **declared.model_dump(mode="json", exclude={"input", "folder"}),
        "size": list(size),
        "layout": layout,
        "scale": declared.scale if declared.scale is not None else by_default,
        "dtype": info.numpy_dtype.name,
    }


# ``chosen/infer.py`` holds the lines of these two functions, too: they need NumPy and Pillow alone.


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
        document = read_json(data_dir / PREPROCESS_JSON)
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and "input" in document else None


def image_reader(preprocessing: Mapping[str, Any]) -> str:
    """Python source: the declaration, and functions that turn images into the model's input with it."""
    functions = "\n\n".join(
        inspect.getsource(lines).replace(": Any", "").replace(" -> Any", "") for lines in (fit_image, image_input)
    )
    declared = pformat(dict(preprocessing), width=110, sort_dicts=False)
    return (
        "# How an image becomes the input, as it was declared for the calibration data.\n"
        f"PREPROCESS = {declared}\nIMAGES = {tuple(sorted(SUFFIXES))!r}\n\n\n{functions}\n{_READER}"
    )
