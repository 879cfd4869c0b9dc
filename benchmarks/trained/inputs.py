"""Real inputs made by script: rendered text, photographs that ship with a package, synthetic speech and music."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.signal import lfilter

if TYPE_CHECKING:
    from PIL.Image import Image

WORDS = (
    "total amount invoice number date of delivery street harbour station quiet river seventeen lamp orange table "
    "measure window garden bottle north paper signal morning seven copper wheel winter report market engine"
)
VOWELS = (
    (730, 1090, 2440),
    (270, 2290, 3010),
    (300, 870, 2240),
    (530, 1840, 2480),
    (570, 840, 2410),
    (660, 1720, 2410),
)
"""First three formants in Hz of a, i, u, e, o, ae (Peterson and Barney, JASA 24, 1952)."""


def phrase(rng: np.random.Generator, words: int) -> str:
    """A few words, one of them a number."""
    chosen = [str(word) for word in rng.choice(WORDS.split(), words)]
    chosen[int(rng.integers(words))] = str(rng.integers(10, 99_999))
    return " ".join(chosen)


def text_line(text: str, height: int, rng: np.random.Generator) -> Image:
    """One line of dark text on a light, slightly uneven ground, as high as asked for; RGB."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(height * 0.62)
    width = int(font.getlength(text)) + height
    ground, ink = int(rng.integers(200, 256)), int(rng.integers(0, 80))
    image = Image.new("RGB", (width, height), (ground, ground, max(0, ground - 20)))
    ImageDraw.Draw(image).text((height // 2, height * 0.12), text, font=font, fill=(ink, ink // 2, ink))
    return image


def page(size: int, rng: np.random.Generator) -> Image:
    """A page of short lines at different places and sizes."""
    from PIL import Image

    image = Image.new("RGB", (size, size), (235, 235, 228))
    top = int(rng.integers(10, 40))
    while top < size - 70:
        line = text_line(phrase(rng, int(rng.integers(1, 4))), int(rng.integers(24, 60)), rng)
        image.paste(line, (int(rng.integers(0, max(1, size - line.width))), top))
        top += line.height + int(rng.integers(10, 50))
    return image


def captcha(photo: Image, rng: np.random.Generator, size: tuple[int, int], characters: int, side: int) -> Image:
    """Letters of ``side`` pixels, each turned a little, on a piece of a photograph."""
    from PIL import Image, ImageDraw, ImageFont

    left, top = (int(rng.integers(0, max(1, have - want))) for have, want in zip(photo.size, size, strict=True))
    ground = photo.crop((left, top, left + size[0], top + size[1])).resize(size)
    image = Image.blend(ground, Image.new("RGB", size, (255, 255, 255)), 0.6)
    step = size[0] // (characters + 1)
    for k in range(characters):
        glyph = Image.new("L", (side, side))
        text = str(rng.choice(list("ABCDEFHKMNPRTWXYabdefhkmnpt2345678")))
        ImageDraw.Draw(glyph).text((side // 5, 0), text, font=ImageFont.load_default(side * 0.75), fill=255)
        turned = glyph.rotate(float(rng.uniform(-25, 25)))
        ink = Image.new("RGB", turned.size, tuple(int(c) for c in rng.integers(0, 120, 3)))
        image.paste(ink, (step // 2 + k * step, int(rng.integers(0, max(1, size[1] - side)))), turned)
    return image


def photographs(folder: Path) -> list[Image]:
    """The colour photographs of scikit-image, in the order of their names."""
    from PIL import Image

    names = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
    return [Image.open(folder / name).convert("RGB") for name in names]


def square_of(photo: Image, rng: np.random.Generator, size: int) -> Image:
    """A random square piece of a photograph, at least two thirds of its shorter side, mirrored at times."""
    from PIL import ImageOps

    side = int(min(photo.size) * rng.uniform(0.67, 1.0))
    left, top = (int(rng.integers(0, have - side + 1)) for have in photo.size)
    piece = photo.crop((left, top, left + side, top + side)).resize((size, size))
    return ImageOps.mirror(piece) if rng.random() < 0.5 else piece


def planes(image: Image, scale: float, shift: float = 0.0, *, bgr: bool = False) -> np.ndarray:
    """(1, channels, height, width): ``value * scale + shift``."""
    values = np.asarray(image, np.float32).reshape(image.height, image.width, -1)
    values = values[..., ::-1] if bgr else values
    return np.ascontiguousarray((values * np.float32(scale) + np.float32(shift)).transpose(2, 0, 1)[None])


def speech(seconds: float, rate: int, rng: np.random.Generator, pitch: float | None = None) -> np.ndarray:
    """A voice by formula, peak 0.5: pulses and noise through formant resonators, in syllables with pauses.

    After Klatt, JASA 67 (1980), cascade branch with three formants and constant bandwidths.
    """
    voice = float(rng.uniform(95, 230)) if pitch is None else pitch
    tract = float(rng.uniform(0.92, 1.12))
    parts: list[np.ndarray] = []
    total = int(seconds * rate)
    while sum(map(len, parts)) < total:
        n = int(rng.uniform(0.12, 0.3) * rate)
        t = np.arange(n) / rate
        f0 = voice * (1 + 0.08 * np.sin(2 * np.pi * rng.uniform(1, 3) * t + rng.uniform(0, 6)))
        pulses = np.diff(np.floor(np.cumsum(f0) / rate), prepend=0.0)
        sound = lfilter([1.0], [1.0, -0.96], pulses) + 0.02 * rng.standard_normal(n)
        for formant, width in zip(VOWELS[int(rng.integers(len(VOWELS)))], (70, 100, 140), strict=True):
            radius, angle = np.exp(-np.pi * width / rate), 2 * np.pi * formant * tract / rate
            poles = [1.0, -2 * radius * np.cos(angle), radius**2]
            sound = lfilter([sum(poles)], poles, sound)
        parts.append(np.diff(sound, prepend=0.0) * np.sin(np.pi * np.arange(n) / n) ** 0.5)
        hiss = np.diff(rng.standard_normal(int(rng.uniform(0.03, 0.09) * rate)), prepend=0.0)
        parts.append(0.02 * hiss * np.abs(parts[-1]).max() * np.hanning(len(hiss)))
        if rng.random() < 0.25:
            parts.append(np.zeros(int(rng.uniform(0.1, 0.5) * rate)))
    sound = np.concatenate(parts)[:total]
    return (0.5 * sound / np.abs(sound).max()).astype(np.float32)


def music(seconds: float, rate: int, rng: np.random.Generator) -> np.ndarray:
    """Plucked notes of a scale with eight decaying partials, up to three at once, peak 0.5."""
    t = np.arange(int(seconds * rate)) / rate
    sound = np.zeros_like(t)
    for start in np.arange(0.05, seconds - 0.2, 0.25):
        for note in rng.choice([48, 50, 52, 55, 57, 60, 62, 64, 67, 69, 72], int(rng.integers(1, 4)), replace=False):
            after = np.maximum(t - start, 0.0)
            envelope = np.where(t >= start, np.minimum(after / 0.005, 1.0) * np.exp(-after * 4), 0.0)
            frequency = 440 * 2 ** ((note - 69) / 12)
            for k in range(1, 9):
                sound += envelope * np.sin(2 * np.pi * k * frequency * after) * np.exp(-k * after) / k**1.3
    return (0.5 * sound / np.abs(sound).max()).astype(np.float32)


def rising_bands(sound: np.ndarray, rate: int, window: int, hop: int) -> np.ndarray:
    """(frames, 2 bands): log magnitudes in 24 triangles of unit area an octave from 30 Hz on, and how they rise.

    As madmom does it: a triangle spans three of the nearest bins, each bin named once.
    """
    padded = np.pad(sound, (window // 2, window))
    frames = padded[np.arange(0, len(sound), hop)[:, None] + np.arange(window)] * np.hanning(window)
    size = window // 2
    hertz = 440 * 2 ** (np.arange(-93, 127) / 24)
    bins = np.unique(np.clip(np.rint(hertz * 2 * size / rate), 1, size - 1)).astype(int)
    weights = np.array([np.interp(np.arange(size), e, (0, 1, 0)) for e in zip(bins, bins[1:], bins[2:], strict=False)])
    logs = np.log10(1 + np.abs(np.fft.rfft(frames, axis=1))[:, :size] @ (weights / weights.sum(1, keepdims=True)).T)
    return np.hstack([logs, np.maximum(np.diff(logs, axis=0, prepend=logs[:1]), 0)]).astype(np.float32)


def noisy(sound: np.ndarray, rng: np.random.Generator, level: float) -> np.ndarray:
    """The sound with white noise of a level relative to its own RMS."""
    rms = float(np.sqrt(np.mean(sound**2)))
    return np.clip(sound + level * rms * rng.standard_normal(len(sound)), -1, 1).astype(np.float32)


def mel_bands(sound: np.ndarray, rate: int, window: int, hop: int, bands: int) -> np.ndarray:
    """(frames, bands): power in mel bands of unit area (Slaney's scale), frames centred."""
    padded = np.pad(sound, window // 2)
    starts = np.arange(0, len(padded) - window + 1, hop)
    frames = padded[starts[:, None] + np.arange(window)] * np.hanning(window + 1)[:-1]
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
    top = 15 + np.log(rate / 2 / 1000) / (np.log(6.4) / 27)
    mels = np.linspace(0, top, bands + 2)
    hertz = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))
    rising = (np.fft.rfftfreq(window, 1 / rate)[None] - hertz[:-1, None]) / np.diff(hertz)[:, None]
    weights = np.maximum(0, np.minimum(rising[:-1], 1 - rising[1:])) * (2 / (hertz[2:] - hertz[:-2]))[:, None]
    return (power @ weights.T).astype(np.float32)


def log_spectrum(sound: np.ndarray, size: int) -> np.ndarray:
    """(frames, size / 2 + 1): logarithm of the magnitude squared over 20, half overlapping Hamming windows."""
    starts = np.arange(0, len(sound) - size + 1, size // 2)
    frames = sound[starts[:, None] + np.arange(size)] * np.hamming(size + 1)[:-1]
    power = np.maximum(np.abs(np.fft.rfft(frames, axis=1)) ** 2, 1e-12)
    return (np.log(power) / 20).astype(np.float32)


def file_contents(photo: Path, rng: np.random.Generator) -> list[bytes]:
    """Files of fourteen types with drawn words and numbers."""
    words = [str(word) for word in rng.choice(WORDS.split(), 60)]
    numbers = rng.integers(0, 10_000, 60).tolist()
    pairs = list(zip(words, numbers, strict=True))
    packed, arrays = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.txt", " ".join(words))
    np.save(arrays, np.array(numbers))
    texts = [
        "import os\n\n\n" + "\n".join(f"def {w}_{n}(x: int) -> int:\n    return x * {n}\n" for w, n in pairs),
        "#include <stdio.h>\n\n" + "\n".join(f"static int {w}_{n}(int x) {{ return x * {n}; }}" for w, n in pairs),
        json.dumps([{"name": w, "count": n} for w, n in pairs], indent=1),
        "name,count,share\n" + "\n".join(f"{w},{n},{n / 7:.3f}" for w, n in pairs),
        "<!DOCTYPE html>\n<html><head><title>x</title></head><body>\n"
        + "\n".join(f"<p class='{w}'>{n}</p>" for w, n in pairs) + "</body></html>",
        "<?xml version='1.0'?>\n<list>\n" + "\n".join(f"  <{w} count='{n}'/>" for w, n in pairs) + "\n</list>",
        "# " + " ".join(words[:4]) + "\n\n" + "\n".join(f"- **{w}**: `{n}`" for w, n in pairs),
        "#!/bin/bash\nset -e\n" + "\n".join(f'if [ "$1" = {w} ]; then echo {n}; fi' for w, n in pairs),
        "CREATE TABLE t (name TEXT, count INT);\n" + "\n".join(f"INSERT INTO t VALUES ('{w}', {n});" for w, n in pairs),
        "[" + words[0] + "]\n" + "\n".join(f"{w} = {n}" for w, n in pairs),
        " ".join(f"{w} {n}." for w, n in pairs),
    ]  # fmt: skip
    return [*(text.encode() for text in texts), packed.getvalue(), arrays.getvalue(), photo.read_bytes()]
