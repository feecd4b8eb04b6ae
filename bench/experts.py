"""Measures the mixture of experts on this machine against other ways to compute it.

``python bench/experts.py [--dtype bfloat16]`` prints the median milliseconds of each way and its
ratio to ours: every expert for every token (dense), `jax.lax.ragged_dot`, and numpy looping over
the experts that have tokens. The ways take turns, so that a busy moment hits all of them.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxserve.kernels.dot import dot
from jaxserve.model.config import ExpertsConfig, ModelConfig
from jaxserve.model.experts import experts_block, route
from jaxserve.model.params import Params

EXPERTS = ExpertsConfig(num_experts=64, num_active=8, mlp_size=256, normalize=True)
CONFIG = ModelConfig(
    architecture="bench",
    vocab_size=64,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=0,
    max_position=64,
    norm_eps=1e-5,
    layers=(),
    tied_head=True,
    experts=EXPERTS,
)
NUM_ROUNDS = 15

Way = Callable[[Params, jax.Array], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 32, 256])
    options = parser.parse_args()
    params = make_params(options.dtype)
    host = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
    print("tokens  way      median_ms  ratio")
    for num_tokens in options.tokens:
        y_TD = jax.random.normal(jax.random.key(1), (num_tokens, CONFIG.hidden_size), jnp.float32)
        y_TD = y_TD.astype(options.dtype)
        for name, ms, ratio in measure(params, host, y_TD):
            print(f"{num_tokens:6}  {name:8} {ms:9.2f} {ratio:6.1f}")


def make_params(dtype: str) -> Params:
    E, D, F = EXPERTS.num_experts, CONFIG.hidden_size, EXPERTS.mlp_size
    shapes = {
        "router_DE": (D, E),
        "gate_EDF": (E, D, F),
        "up_EDF": (E, D, F),
        "down_EFD": (E, F, D),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: (0.05 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def measure(params: Params, host: Params, y_TD: jax.Array) -> list[tuple[str, float, float]]:
    """Returns each way's median milliseconds, and its ratio to ours."""
    ways: dict[str, Way] = {
        "ours": jax.jit(blocks),
        "dense": jax.jit(dense),
        "ragged": jax.jit(ragged),
        "numpy": lambda _, y_TD: numpy_loop(params, host, y_TD),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    right = np.asarray(ways["ours"](params, y_TD))
    for name, way in ways.items():
        error = np.abs(np.asarray(way(params, y_TD)) - right).max() / np.abs(right).max()
        assert error < 0.02, f"{name} computes something else: {error}"
    for _ in range(NUM_ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way(params, y_TD))
            times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(some) for name, some in times.items()}
    return [(name, ms, ms / medians["ours"]) for name, ms in medians.items()]


def pick(params: Params, y_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
    return route(params, y_TD, jnp.ones(y_TD.shape[0], jnp.bool), experts=EXPERTS)


def blocks(params: Params, y_TD: jax.Array) -> jax.Array:
    return experts_block(params, y_TD, jnp.ones(y_TD.shape[0], jnp.bool), config=CONFIG)


def dense(params: Params, y_TD: jax.Array) -> jax.Array:
    """Every expert for every token; the shares of most are 0."""
    share_TJ, expert_TJ = pick(params, y_TD)
    gate_ETF = dot("TD,EDF->ETF", y_TD, params["gate_EDF"])
    hidden_ETF = jax.nn.silu(gate_ETF) * dot("TD,EDF->ETF", y_TD, params["up_EDF"])
    out_ETD = dot("ETF,EFD->ETD", hidden_ETF.astype(y_TD.dtype), params["down_EFD"])
    token_T1 = jnp.arange(y_TD.shape[0], dtype=jnp.int32)[:, None]
    share_TE = jnp.zeros((y_TD.shape[0], EXPERTS.num_experts), jnp.float32)
    return dot("ETD,TE->TD", out_ETD, share_TE.at[token_T1, expert_TJ].set(share_TJ))


def ragged(params: Params, y_TD: jax.Array) -> jax.Array:
    """Pairs sorted by expert, and XLA's own product of ragged groups."""
    share_TJ, expert_TJ = pick(params, y_TD)
    T, J = expert_TJ.shape
    order_I = jnp.argsort(expert_TJ.reshape(T * J))
    count_E = jnp.bincount(expert_TJ.reshape(T * J), length=EXPERTS.num_experts)
    count_E = count_E.astype(jnp.int32)

    def product(x_IA: jax.Array, weight_EAB: jax.Array) -> jax.Array:
        return lax.ragged_dot(x_IA, weight_EAB, count_E, preferred_element_type=jnp.float32)

    y_ID = y_TD[order_I // J]
    hidden_IF = jax.nn.silu(product(y_ID, params["gate_EDF"])) * product(y_ID, params["up_EDF"])
    out_ID = product(hidden_IF.astype(y_TD.dtype), params["down_EFD"])
    out_TJD = out_ID[jnp.argsort(order_I)].reshape(T, J, -1)
    return (out_TJD * share_TJ[:, :, None]).sum(axis=1)


_pick = jax.jit(pick)


def numpy_loop(params: Params, host: Params, y_TD: jax.Array) -> np.ndarray:
    """Float32 whatever the dtype: numpy has no bfloat16 products."""
    share_TJ, expert_TJ = (np.asarray(x) for x in _pick(params, y_TD))
    rows_TD = np.asarray(y_TD, np.float32)
    out_TD = np.zeros(rows_TD.shape, np.float32)
    for expert in np.unique(expert_TJ):
        token, choice = np.nonzero(expert_TJ == expert)
        gate = rows_TD[token] @ host["gate_EDF"][expert]
        hidden = gate / (1 + np.exp(-gate)) * (rows_TD[token] @ host["up_EDF"][expert])
        out_TD[token] += share_TJ[token, choice, None] * (hidden @ host["down_EFD"][expert])
    return out_TD


if __name__ == "__main__":
    main()
