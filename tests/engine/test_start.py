"""From a folder on disk to tokens: the whole wiring, on a model of two layers."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.header import ModelHeader
from jaxserve.checkpoint.safetensors import HfFolderSource
from jaxserve.config import load_config
from jaxserve.engine import EngineState, ServedModel
from jaxserve.engine.chat_template import replace_template
from jaxserve.engine.start import _describe, load_engine
from jaxserve.errors import CheckpointError, ConfigError, InvalidRequestError
from jaxserve.identity import CacheIdentity
from jaxserve.llm import LLM
from jaxserve.model.config import LayerConfig, RopeConfig
from jaxserve.request import GenerationRequest, SamplingParams
from tests.checkpoint.writers import T1, make_weights, write_hf
from tests.engines import gather
from tests.oracle import oracle_greedy

FLAGS = {
    "model.dtype": "float32",
    "model.max_model_tokens": 64,
    "kv.page_size": 4,
    "kv.num_pages": 33,
    "scheduler.max_seqs": 4,
    "buckets.decode_seqs": (4,),
    "buckets.chunk_tokens": (16,),
    "buckets.chunk_decode_seqs": (4,),
    "runner.forbid_recompile": True,
}
CONFIG = load_config(flags=FLAGS)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", T1, make_weights(T1))


def describe(
    header: ModelHeader, *, weights_digest: str = "one", dtype: str = "float32"
) -> ServedModel:
    return _describe(
        header,
        CONFIG,
        max_model_tokens=64,
        weights_digest=weights_digest,
        dtype=dtype,
        kv_dtype="float32",
    )


def solo(folder: Path, prompt: tuple[int, ...]) -> tuple[int, ...]:
    params = HfFolderSource(folder).load_params(np.float32)
    return tuple(oracle_greedy(params, prompt, T1, num_tokens=12))


def test_a_folder_becomes_an_engine_that_gives_the_models_tokens(folder: Path) -> None:
    phases: dict[str, tuple[int, int]] = {}

    def progress(phase: str, num_done: int, num_all: int) -> None:
        phases[phase] = (num_done, num_all)

    prompts = [tuple(range(n, n + 3 * n)) for n in range(1, 8)]  # up to two chunks
    with LLM(str(folder), CONFIG, progress=progress) as llm:
        completions = llm.generate(prompts, GREEDY)
        metrics = llm.engine.metrics
        identity = llm.engine._namespaces.find_identity("", "", prompt_len=1)
    assert [done.token_ids for done in completions] == [solo(folder, p) for p in prompts]
    assert phases.keys() == {"load", "compile"}
    assert all(num_done == num_all for num_done, num_all in phases.values())
    assert llm.model == ServedModel(
        name="tiny",
        max_model_tokens=64,
        vocab_size=T1.vocab_size,
        eos_ids=frozenset({1}),
        bos_id=llm.tokenizer.bos_id,
        path=str(folder),
        architecture="llama",
        dtype="float32",
        quantization=llm.model.quantization,
        capacity_tokens=128,
        weights_digest=llm.model.weights_digest,
        positions=llm.model.positions,
        kv_dtype="float32",
    )
    header = HfFolderSource(folder).load_header()
    served = describe(header, weights_digest=header.digest)
    assert identity == CacheIdentity(
        weights=served.weights_digest,
        tokenizer=header.tokenizer.digest,
        positions=served.positions,
        kv_dtype="float32",
        page_size=4,
    )
    assert metrics.value("recompiles_total") == 0
    assert metrics.value("kv_capacity_tokens") == 128
    assert metrics.value("overlapped_steps_total") > 0


def test_whatever_changes_k_and_v_is_in_the_digests(folder: Path) -> None:
    header = HfFolderSource(folder).load_header()
    layers = header.config.layers
    theta = dataclasses.replace(layers[0], rope=RopeConfig(theta=5.0))
    window = dataclasses.replace(layers[0], window=5)

    def change(first: LayerConfig | None = None, **changes: Any) -> ModelHeader:  # noqa: ANN401
        if first is not None:
            changes["layers"] = (first, *layers[1:])
        return dataclasses.replace(header, config=dataclasses.replace(header.config, **changes))

    base = describe(header)
    others = [
        describe(header, weights_digest="other"),
        describe(header, dtype="bfloat16"),
        describe(change(norm_eps=0.5)),
    ]
    assert len({served.weights_digest for served in (base, *others)}) == 4
    turned = [describe(change(theta)), describe(change(window))]
    assert len({served.positions for served in (base, *turned)}) == 3
    assert describe(header) == base


@pytest.mark.parametrize("prompt", [(5,), (5, 6, 7), tuple(range(20))])
def test_an_engine_for_one_request_compiles_less_and_gives_the_same(
    folder: Path, prompt: tuple[int, ...]
) -> None:
    request = GenerationRequest(prompt=prompt, sampling=GREEDY)
    seen: list[ServedModel] = []

    def only_for(model: ServedModel) -> GenerationRequest:
        seen.append(model)
        return request

    engine = load_engine(str(folder), CONFIG, only_for=only_for)
    assert engine.state is EngineState.STARTING
    engine.start()
    output = gather(engine.submit(request))
    engine.stop()
    assert tuple(output.token_ids) == solo(folder, prompt)
    assert (seen[0].name, seen[0].vocab_size) == ("tiny", T1.vocab_size)
    assert engine.metrics.total("compiles_total") <= 6


def test_a_request_that_is_not_allowed_is_refused_before_anything_is_compiled(
    folder: Path,
) -> None:
    request = GenerationRequest(prompt=(1, T1.vocab_size))
    phases: list[str] = []
    with pytest.raises(InvalidRequestError, match=f"ids are 0 to {T1.vocab_size - 1}"):
        load_engine(
            str(folder),
            CONFIG,
            progress=lambda phase, done, total: phases.append(phase),
            only_for=lambda model: request,
        )
    assert phases == []


def test_what_a_request_leaves_out_is_the_configurations_then_the_models_own(
    tmp_path: Path,
) -> None:
    path = write_hf(tmp_path / "model", T1, make_weights(T1))
    (path / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.9}'
    )
    header = HfFolderSource(path).load_header()
    for section, wanted in (
        ({}, {"temperature": 0.6, "top_k": 20, "top_p": 0.9}),
        (
            {"sampling.temperature": 0.0, "sampling.min_p": 0.1},
            {"temperature": 0.0, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
        ),
    ):
        config = load_config(flags=FLAGS | section)
        assert _describe(header, config, max_model_tokens=64).sampling_defaults == wanted


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="there is no model 'no-such-model' here"):
        load_engine("no-such-model", CONFIG)


def test_a_template_of_the_operators_takes_the_place_of_the_models_own(
    folder: Path, tmp_path: Path
) -> None:
    header = HfFolderSource(folder).load_header()
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}é{% endfor %}")
    assert replace_template(header, None) is header
    replaced = replace_template(header, path)
    assert replaced.tokenizer.chat_template == path.read_text()
    assert replaced.identity != header.identity
    for content, reason in ((b"{% if %}", "is no template"), (b"\xff", "cannot be read")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"model\.chat_template .*{reason}"):
            replace_template(header, path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_engine(str(folder), load_config(flags={**FLAGS, "model.chat_template": tmp_path}))


@pytest.mark.parametrize("module", ["jaxserve", "jaxserve.engine", "jaxserve.llm"])
def test_importing_brings_no_jax(module: str) -> None:
    code = f"import sys, {module}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
