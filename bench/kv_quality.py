"""What rounding K/V costs: a model's predictions of a page of text, by the dtype of its pool.

    python -m bench.kv_quality [--model smollm2-135m-instruct] [--dtype float32 bfloat16]

Each token is predicted from those before it, all in one forward; K/V is written and read as when
serving. Beside float32 K/V with the same weights it prints the perplexity, how far a logit and a
token's log-probability move, and how often the likeliest token is the same one. Counts, no times.
"""

import argparse
import functools
import math

import jax
import numpy as np
from jax import numpy as jnp

from jaxserve.checkpoint.registry import find_model
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.pool import empty_pool
from jaxserve.model.config import ModelConfig
from jaxserve.model.params import Params
from jaxserve.model.transformer import TokenBatch, forward, logits

PAGE = 16
KV_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
TEXT = """\
The harbour of Selm lies on the north side of the island, where the cliffs fall back and leave room
for a street, a church and about forty houses. In summer two ferries a day come from the mainland;
in winter there is one, and when the wind stands in the north-west for a week there is none at all.
The people who live there keep a pantry, as their grandparents did, and do not think about it much.

Marta Lund has run the post office since 1987. She knows who writes to whom, who has stopped
writing, and which of the summer guests will pay for the parcel they forgot. "A letter is a slow
thing," she likes to say, "but it arrives." Last spring the company that owns the building wanted to
close the counter and put a machine in its place. The council met three times. At the third meeting
the old teacher stood up and read aloud the names of everyone over seventy who had no telephone, and
there were nineteen of them. The counter is still open.

How long does a letter take? It depends on the day. One posted before ten on a Monday leaves with
the noon ferry, is sorted in the evening and delivered on Tuesday, if the address is in the same
county. One posted on a Friday afternoon waits until Saturday, and then over Sunday:

1. Monday to Thursday, before 10:00: one day.
2. Monday to Thursday, after 10:00: two days.
3. Friday and Saturday: three days, four in winter.

The island is 11.4 kilometres long and 3.2 wide. About 640 people live on it, which is 17 for each
square kilometre; in 1920 there were 1,900. Most of them fished for herring then. The herring went
away in the fifties, came back for a few years, and went away again, and the boats were sold one by
one. What is left is sheep, a little barley, a boatyard that repairs wooden hulls, and, since 2009,
the turbines on the western ridge, which make more electricity than the island can use.

def days_by_ferry(weekday, hour):
    if weekday in ("friday", "saturday"):
        return 3
    return 1 if hour < 10 else 2

People ask whether it is lonely. Marta laughs at that. In the city, she says, she would know the
names of perhaps five neighbours; here she knows all of them, and their dogs.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    source = find_model(options.model)
    header = source.load_header()
    ids = list(header.tokenizer.encode(TEXT))
    print(f"{header.name}, {len(ids)} tokens of text")
    print(
        "| weights | K/V | perplexity | largest difference of a logit | mean difference of a "
        "log-probability | same likeliest token |\n|" + " --- |" * 6
    )
    for dtype in options.dtype:
        params = source.load_params(dtype, lambda done, total: None)
        exact_TV: np.ndarray | None = None
        for kv_dtype in KV_DTYPES:
            logits_TV = predict(params, header.config, ids, kv_dtype=kv_dtype)
            exact_TV = logits_TV if exact_TV is None else exact_TV
            print(f"| {dtype} | {kv_dtype} | {describe(logits_TV, exact_TV, ids)} |", flush=True)


def predict(params: Params, config: ModelConfig, ids: list[int], *, kv_dtype: str) -> np.ndarray:
    """Returns the logits after each token of one sequence, float32 [T, V]."""
    T = len(ids)
    positions_T = jnp.arange(T, dtype=jnp.int32)
    num_pages = 1 + -(-T // PAGE)
    batch = TokenBatch(
        token_ids_T=jnp.asarray(ids, jnp.int32),
        positions_T=positions_T,
        write_pages_T=1 + positions_T // PAGE,
        write_rows_T=positions_T % PAGE,
        page_table_XP=jnp.arange(1, num_pages, dtype=jnp.int32)[None, :],
        q_starts_X=jnp.zeros(1, jnp.int32),
        q_lens_X=jnp.full(1, T, jnp.int32),
        prompt_lens_X=jnp.full(1, T, jnp.int32),
    )
    shape = (num_pages, 2, config.num_kv_heads, PAGE, config.head_dim)
    kv = tuple(empty_pool(shape, kv_dtype) for _ in range(config.num_layers))
    run = jax.jit(
        functools.partial(forward, config=config, num_single_rows=0, tile=T, kernels=Kernels())
    )
    _, hidden_TD = run(params, kv, batch)
    head = jax.jit(functools.partial(logits, config=config, matmul="xla"))
    return np.asarray(head(params, hidden_TD))[:, : config.vocab_size]


def describe(logits_TV: np.ndarray, exact_TV: np.ndarray, ids: list[int]) -> str:
    """Returns the cells of a row; what the last token is followed by is not known."""
    told_T, exact_T = (log_probabilities(each, ids) for each in (logits_TV, exact_TV))
    is_same_T = logits_TV.argmax(-1) == exact_TV.argmax(-1)
    cells = (
        f"{math.exp(-told_T.mean()):.4f}",
        f"{np.abs(logits_TV - exact_TV).max():.3f}",
        f"{np.abs(told_T - exact_T).mean():.4f}",
        f"{is_same_T.sum()} of {len(is_same_T)}",
    )
    return " | ".join(cells)


def log_probabilities(logits_TV: np.ndarray, ids: list[int]) -> np.ndarray:
    """Returns each token's from the second on, in float64."""
    logits_TV = logits_TV[:-1].astype(np.float64)
    top_T = logits_TV.max(-1)
    total_T = top_T + np.log(np.exp(logits_TV - top_T[:, None]).sum(-1))
    result: np.ndarray = logits_TV[np.arange(len(ids) - 1), ids[1:]] - total_T
    return result


if __name__ == "__main__":
    main()
