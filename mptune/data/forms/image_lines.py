"""How an image becomes a model's input. ``chosen/infer.py`` holds these lines, too: NumPy and Pillow alone.

One dictionary declares all of it (``mptune.data.forms.images`` says what its keys mean).
"""

from typing import Any

import numpy as np


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
