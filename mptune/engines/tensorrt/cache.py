"""TensorRT's caches, in files that the processes of a run share under a lock.

TensorRT's timing cache (the times of its tactics) makes builds faster and more alike; TensorRT-RTX's runtime cache (the
kernels that it compiled) makes first runs faster. No result needs either: a file that cannot be used is replaced.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import filelock

from mptune.files import whole_file

_LOCK_TIMEOUT_S = 60.0


class TimingCache:
    """A timing cache in a file. The lock is held to read and to write, not while an engine is built.

    A file that cannot be used (damaged, or of another version or GPU) is replaced by a fresh one, with a warning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = filelock.FileLock(path.with_name(path.name + ".lock"), timeout=_LOCK_TIMEOUT_S)
        self._seen = b""
        self._attached: Any = None

    def attach(self, config: Any, log: Any) -> list[str]:
        """Load the file into a builder's configuration.

        Args:
            log: the builder's log; TensorRT logs that a file is damaged, and continues with an empty cache.
        """
        try:
            self._seen = self._read()
        except (OSError, filelock.Timeout) as error:
            return [f"no timing cache ({error}): builds take longer; make {self._path} readable"]
        warned = len(log.warnings)
        timing_cache = config.create_timing_cache(self._seen)
        damaged = any("timing cache" in text.lower() for text in log.warnings[warned:])
        problem = "is damaged" if damaged or timing_cache is None else ""
        if not problem and not config.set_timing_cache(timing_cache, ignore_mismatch=False):
            problem = "was written by another version of TensorRT or on another GPU"
        self._attached = timing_cache  # The configuration does not own it.
        if not problem:
            return []
        self._attached = config.create_timing_cache(b"")
        config.set_timing_cache(self._attached, ignore_mismatch=False)
        return [f"the timing cache {problem}: it was replaced by an empty one, nothing is to be done ({self._path})"]

    def save(self, config: Any) -> list[str]:
        """Write the cache, merged with what other processes have written meanwhile."""
        timing_cache = config.get_timing_cache()
        if timing_cache is None:
            return []
        try:
            with self._lock:
                written = self._path.read_bytes() if self._path.exists() else b""
                if written != self._seen:
                    timing_cache.combine(config.create_timing_cache(written), ignore_mismatch=False)
                with whole_file(self._path) as partial:
                    partial.write_bytes(bytes(memoryview(timing_cache.serialize())))
        except (OSError, filelock.Timeout) as error:
            return [f"the timing cache could not be written ({error}): later builds take longer; free some space"]
        return []

    def _read(self) -> bytes:
        with self._lock:
            return self._path.read_bytes() if self._path.exists() else b""


class RuntimeCache:
    """The kernels that TensorRT-RTX has compiled for this GPU, for all engines of a run.

    Several sessions are open at a time, each with a cache of its own that began with what the file held then.
    """

    def __init__(self, path: Path, runtime_config: Any) -> None:
        """Load the file into the configuration of a new context."""
        self._path = path
        self._lock = filelock.FileLock(path.with_name(path.name + ".lock"), timeout=_LOCK_TIMEOUT_S)
        self._runtime_cache: Any = runtime_config.create_runtime_cache()
        self._seen = b""
        with contextlib.suppress(OSError, filelock.Timeout), self._lock:
            self._seen = self._read()
            if self._seen:
                # A file of another GPU or version is rejected; its kernels are compiled again.
                self._runtime_cache.deserialize(self._seen)
        runtime_config.set_runtime_cache(self._runtime_cache)

    def save(self) -> None:
        """Write the kernels, beside those that other sessions have written meanwhile.

        NVIDIA does not say whether ``deserialize`` adds to a cache or replaces it: of what was here, what was written
        and both together, the largest is kept. Where writing fails, kernels are compiled again.
        """
        runtime_cache = self._runtime_cache
        with contextlib.suppress(OSError, filelock.Timeout), self._lock:
            versions = [bytes(memoryview(runtime_cache.serialize()))]
            written = self._read()
            if written not in (b"", self._seen) and runtime_cache.deserialize(written):
                versions += [written, bytes(memoryview(runtime_cache.serialize()))]
            largest = max(versions, key=len)
            if largest != written:
                with whole_file(self._path) as partial:
                    partial.write_bytes(largest)
            self._seen = largest

    def close(self) -> None:
        """Write the kernels and let go of the cache."""
        self.save()
        self._runtime_cache = None

    def _read(self) -> bytes:
        return self._path.read_bytes() if self._path.exists() else b""
