"""Writes the model and the samples of `mptune demo` with the tutorial's code: its denoiser, with drawn weights."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
TUTORIAL = HERE.parents[1] / "docs/guide/tutorial.md"


def main() -> None:
    blocks = dict(re.findall(r'```python title="(\w+)\.py"\n(.*?)```', TUTORIAL.read_text(encoding="utf-8"), re.DOTALL))
    exec(blocks["export"].replace('"model.onnx"', "path"), {"path": HERE / "denoiser.onnx"})
    # A camera's images are whole numbers, which take half the bytes.
    samples = blocks["samples"].replace("clip(0, 4095)", "clip(0, 4095).round()")
    call = "np.savez_compressed(path"
    exec(samples.replace('np.savez("samples.npz"', call), {"path": HERE / "denoiser_calib.npz"})


if __name__ == "__main__":
    main()
