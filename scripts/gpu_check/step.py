"""How many programs a step is, counted while the engine's own runner runs some on this machine."""

from collections.abc import Iterator
from unittest import mock

import jax

from jaxserve.config import Config
from jaxserve.metrics import Metrics
from jaxserve.model.params import init_params
from jaxserve.plan import Chunk, RowLoad, StepPlan
from jaxserve.request import SamplingParams
from jaxserve.runner.lowering import ProgramKey
from jaxserve.runner.programs import Programs
from jaxserve.runner.runner import Runner
from scripts.gpu_check.faults import Fault, Kind
from scripts.gpu_report import make_config

MAX_PROGRAMS = 2  # a forward and an output
NUM_ROWS, PROMPT_LEN, PAGE_SIZE = 4, 8, 16


def check_step() -> Iterator[Fault]:
    """Prints how many programs steps are, and yields a fault for each that is too many."""
    print("| K/V | step | programs |\n| --- | --- | --- |")
    for kv_dtype in ("float32", "int8"):
        yield from _check_pool(kv_dtype)


def _check_pool(kv_dtype: str) -> Iterator[Fault]:
    """Each row holds its prompt after the first step; a row's first step also loads it."""
    ran: list[str] = []
    get = Programs.__getitem__

    def get_counting(programs: Programs, key: ProgramKey) -> object:
        program = get(programs, key)

        def run(*arguments: object) -> object:
            ran.append(key.kind)
            return program(*arguments)

        return run

    model = make_config("tiny")
    config = Config.model_validate(
        {
            "model": {"dtype": "float32", "max_model_tokens": 2 * PAGE_SIZE},
            "kv": {
                "num_pages": 1 + 2 * NUM_ROWS,
                "page_size": PAGE_SIZE,
                "dtype": kv_dtype,
            },
            "scheduler": {"max_seqs": NUM_ROWS},
            "buckets": {
                "decode_seqs": [NUM_ROWS],
                "chunk_tokens": [NUM_ROWS * 16],
                "chunk_decode_seqs": [NUM_ROWS],
            },
            # else a step could run what was not compiled beforehand, and not be counted
            "runner": {"forbid_recompile": True, "attention": "xla", "matmul": "xla"},
        }
    )
    with mock.patch.object(Programs, "__getitem__", get_counting):
        params = init_params(model, jax.random.key(0), "float32", stddev=0.02)
        runner = Runner(params, model, config, metrics=Metrics())
    for step_id, (name, lens) in enumerate(
        (
            ("first", (PROMPT_LEN,) * (NUM_ROWS - 1)),
            ("one token a row", (1,) * (NUM_ROWS - 1)),
            ("and a prompt beside", (1,) * (NUM_ROWS - 1) + (PROMPT_LEN,)),
        ),
        start=1,
    ):
        del ran[:]
        runner.launch(_plan(step_id, lens)).result()
        print(f"| {kv_dtype} | {name} | {', '.join(ran)} |")
        num_programs = len(ran) - ran.count("row_load")  # once a request
        if not 0 < num_programs <= MAX_PROGRAMS:
            text = f"{kv_dtype}, {name}: {', '.join(ran)}"
            yield Fault(kind=Kind.MANY_PROGRAMS, text=text)


def _plan(step_id: int, lens: tuple[int, ...]) -> StepPlan:
    """Returns a step of so many tokens of each row; a row's prompt comes first."""
    chunks, loads = [], []
    for row, num_tokens in enumerate(lens):
        is_prompt = num_tokens == PROMPT_LEN
        index = 0 if is_prompt else step_id - 1
        chunks.append(
            Chunk(
                sequence_id=row,
                row=row,
                start=0 if is_prompt else PROMPT_LEN + index - 1,
                num_tokens=num_tokens,
                token_ids=(5,) * num_tokens if is_prompt else None,
                samples=True,
                output_index=index,
                prompt_len=PROMPT_LEN,
            )
        )
        if is_prompt:
            loads.append(
                RowLoad(
                    sequence_id=row,
                    row=row,
                    pages=(1 + 2 * row, 2 + 2 * row),
                    sampling=SamplingParams(temperature=0.0),
                    seed=row,
                    choice=0,
                    stop_ids=(),
                )
            )
    return StepPlan(step_id=step_id, others=tuple(chunks), row_loads=tuple(loads))
