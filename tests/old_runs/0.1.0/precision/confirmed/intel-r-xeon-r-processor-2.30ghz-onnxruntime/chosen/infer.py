#!/usr/bin/env python3
"""Run and time the mixed-precision model beside this script. Needs numpy and onnxruntime, nothing else.

    python infer.py                                   random inputs
    python infer.py --data inputs.npz --save out.npz  your inputs, and keep the outputs
    python infer.py --shape image=1x3x480x640         sizes for a model with dynamic axes

`mptune pick` writes this file anew: copy it before you change it.
"""

import argparse
import contextlib
import io
import os
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

# No TF32, as in the search. CUDA reads this variable when it starts; matrix products ignore it now and then. The
# provider's option "0" is certain, but slows convolutions down: it is "1" where they are a good part of the work.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
USE_TF32 = "1"

NUMPY_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int16)": np.int16,
    "tensor(uint16)": np.uint16,
    "tensor(int32)": np.int32,
    "tensor(uint32)": np.uint32,
    "tensor(int64)": np.int64,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
}


def open_session(model, provider):
    """Open the model on the GPU where there is one, else on the CPU."""
    cpu = "CPUExecutionProvider"
    if provider != "cpu" and "CUDAExecutionProvider" in ort.get_available_providers():
        quiet = io.StringIO() if provider == "auto" else sys.stderr  # without a GPU the attempt would fill the screen
        ort.set_default_logger_severity(4 if provider == "auto" else 2)
        options = ort.SessionOptions()
        options.log_severity_level = 4 if provider == "auto" else 2
        providers = [("CUDAExecutionProvider", {"use_tf32": USE_TF32}), cpu]
        try:
            if hasattr(ort, "preload_dlls"):
                with contextlib.redirect_stdout(quiet):
                    ort.preload_dlls()  # CUDA and cuDNN from pip packages, where they are installed
            session = ort.InferenceSession(str(model), options, providers=providers, enable_fallback=0)
            if "CUDAExecutionProvider" in session.get_providers():
                return session
        except Exception as error:
            if provider == "cuda":
                sys.exit(f"error: the CUDA provider does not start: {error}")
        finally:
            ort.set_default_logger_severity(2)
    if provider == "cuda":
        sys.exit("error: there is no CUDA provider here\nhint: install onnxruntime-gpu and CUDA, or use --provider cpu")
    options = ort.SessionOptions()
    # ONNX Runtime's CPU provider with FP16 norms: planned buffers corrupt them, and this fusion crashes (1.31).
    options.enable_mem_pattern = False
    return ort.InferenceSession(str(model), options, providers=[cpu], disabled_optimizers=["MatmulTransposeFusion"])


def parse_shapes(texts):
    """Turn ["image=1x3x480x640"] into {"image": [1, 3, 480, 640]}."""
    shapes = {}
    for text in texts:
        name, separator, sizes = text.rpartition("=")
        try:
            shapes[name] = [int(size) for size in sizes.split("x")]
        except ValueError:
            separator = ""
        if not separator:
            sys.exit(f"error: --shape {text} is not NAME=AxBxC\nhint: for example --shape image=1x3x480x640")
    return shapes


def random_feeds(session, shapes, batch, seed):
    """Random values of the right types and shapes; good for timing, not for judging the error."""
    generator = np.random.default_rng(seed)
    feeds = {}
    for meta in session.get_inputs():
        shape = shapes.get(meta.name)
        if shape is None:
            shape = [size if isinstance(size, int) else batch if axis == 0 else 1 for axis, size in enumerate(meta.shape)]
        dtype = NUMPY_TYPES.get(meta.type)
        if dtype is None:
            sys.exit(f"error: input {meta.name} is a {meta.type}: give it with --data")
        if np.issubdtype(dtype, np.floating):
            feeds[meta.name] = generator.standard_normal(shape).astype(dtype)
        else:
            feeds[meta.name] = generator.integers(0, 2, size=shape).astype(dtype)
    return feeds


def read_feeds(session, path):
    """Read inputs by name from an .npz, or the only input from an .npy."""
    metas = {meta.name: meta for meta in session.get_inputs()}
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        sys.exit(f"error: cannot read {path}: {error}\nhint: give an .npz with one array per input, or an .npy")
    if isinstance(loaded, np.ndarray):
        arrays = {next(iter(metas)): loaded}
    else:
        arrays = {name: loaded[name] for name in loaded.files}
    missing = [name for name in metas if name not in arrays]
    if missing:
        names = ", ".join(metas)
        sys.exit(f"error: {path} has no input {missing[0]}\nhint: save it as np.savez(path, ...) with: {names}")
    return {
        name: np.asarray(arrays[name], dtype=NUMPY_TYPES.get(meta.type), order="C") for name, meta in metas.items()
    }


def run(session, feeds):
    """Compute all outputs, by name."""
    names = [meta.name for meta in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, feeds)))
    except Exception as error:
        message = " ".join(str(error).split())
        sys.exit(f"error: the model does not run on these inputs: {message}\nhint: --data or --shape give others")


def time_model(session, feeds, warmup, iterations):
    """Milliseconds per run. Inputs and outputs stay on the device; every run is synchronised before the clock stops."""
    device = "cuda" if "CUDAExecutionProvider" in session.get_providers() else "cpu"
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value, device, 0))
    for meta in session.get_outputs():
        binding.bind_output(meta.name, device, 0)
    binding.synchronize_inputs()
    times_ms = []
    for count in range(warmup + iterations):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        if count >= warmup:
            times_ms.append((time.perf_counter() - start) * 1e3)
    return np.array(times_ms)


def parse_arguments():
    here = Path(__file__).resolve().parent
    summary, _, examples = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog="examples:\n" + examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=here / "model.onnx", help="another model (default: model.onnx here)")
    parser.add_argument("--data", type=Path, help=".npz with one array per input, or .npy for a model with one input")
    parser.add_argument("--save", type=Path, metavar="OUT.npz", help="write the outputs to this .npz")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=AxBxC", help="shape of a random input")
    parser.add_argument("--batch", type=int, default=1, help="first axis of random inputs where it is dynamic (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    parser.add_argument("--iterations", type=int, default=100, help="timed runs; 0 does not time (default: 100)")
    parser.add_argument("--warmup", type=int, default=20, help="untimed runs before them (default: 20)")
    parser.add_argument("--provider", choices=["auto", "cuda", "cpu"], default="auto", help="where to run (default: auto)")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    if not arguments.model.exists():
        sys.exit(f"error: there is no {arguments.model}")
    session = open_session(arguments.model, arguments.provider)
    if arguments.data is not None:
        feeds = read_feeds(session, arguments.data)
    else:
        feeds = random_feeds(session, parse_shapes(arguments.shape), arguments.batch, arguments.seed)

    print(f"model     {arguments.model}")
    print(f"runs on   {session.get_providers()[0]}, onnxruntime {ort.__version__}, TF32 off")
    for name, value in feeds.items():
        origin = "given" if arguments.data is not None else "random"
        print(f"input     {name}  {value.dtype}  {list(value.shape)}  ({origin})")

    outputs = run(session, feeds)
    for name, value in outputs.items():
        broken = 0
        if np.issubdtype(value.dtype, np.floating):
            broken = int(value.size - np.isfinite(value).sum())
        note = f"  WARNING: {broken} values are NaN or infinite" if broken else ""
        print(f"output    {name}  {value.dtype}  {list(value.shape)}{note}")

    if arguments.iterations > 0:
        times_ms = time_model(session, feeds, arguments.warmup, arguments.iterations)
        print(
            f"latency   median {np.median(times_ms):.3f} ms, p99 {np.percentile(times_ms, 99):.3f} ms "
            f"over {len(times_ms)} runs (with the call itself, so a little above GPU compute time)"
        )
    if arguments.save is not None:
        with open(arguments.save, "wb") as file:
            np.savez(file, **outputs)
        print(f"saved     {arguments.save}")


if __name__ == "__main__":
    main()
