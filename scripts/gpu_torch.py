"""What a decode step of the same shapes takes in torch: SDPA, a static cache, a CUDA graph.

    python scripts/gpu_torch.py --shape 128256 4096 32 32 8 128 14336 --rows 1 16 --kv-len 512

scripts/gpu_report.py runs it with an interpreter that has torch; it needs nothing else and nothing
of jaxserve. Prints one JSON line. Weights are random, bfloat16; sampling is greedy. On a CPU it
runs too, without a graph, to be tried.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

NUM_STEPS = 40
NUM_WARM_UP = 8
EPSILON = 1e-5


@dataclasses.dataclass(slots=True, frozen=True)
class Shape:
    """In the order of the command line."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


class Llama:
    """A decode step of rows that all hold `kv_len` tokens; its K/V is written in place."""

    def __init__(self, shape: Shape, *, num_rows: int, kv_len: int, device: str) -> None:
        self._shape, self._kv_len = shape, kv_len

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, dtype=torch.bfloat16, device=device) * 0.02

        hidden, head_dim = shape.hidden, shape.head_dim
        num_qkv = (shape.heads + 2 * shape.kv_heads) * head_dim
        self._embedding = random(shape.vocab, hidden)
        self._head = random(shape.vocab, hidden)
        self._layers = [
            (
                random(num_qkv, hidden),
                random(hidden, shape.heads * head_dim),
                random(2 * shape.mlp, hidden),
                random(hidden, shape.mlp),
            )
            for _ in range(shape.layers)
        ]
        cache = (num_rows, shape.kv_heads, kv_len, head_dim)
        self._cache = [(random(*cache), random(*cache)) for _ in range(shape.layers)]
        self._norm = torch.ones(hidden, dtype=torch.bfloat16, device=device)
        angles = float(kv_len - 1) / 10000 ** (
            torch.arange(0, head_dim, 2, device=device).float() / head_dim
        )
        self._cos, self._sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self._last = torch.tensor([kv_len - 1], device=device)
        self.token_ids = torch.zeros(num_rows, dtype=torch.long, device=device)

    def step(self) -> None:
        """Replaces `token_ids` by the next ones."""
        shape, rows = self._shape, len(self.token_ids)
        x = functional.embedding(self.token_ids, self._embedding)
        for (qkv, out, gate_up, down), (keys, values) in zip(
            self._layers, self._cache, strict=True
        ):
            heads = functional.linear(self._normalize(x), qkv)
            heads = heads.view(rows, shape.heads + 2 * shape.kv_heads, 1, shape.head_dim)
            q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
            keys.index_copy_(2, self._last, self._rotate(k))
            values.index_copy_(2, self._last, v)
            seen = functional.scaled_dot_product_attention(
                self._rotate(q), keys, values, enable_gqa=True
            )
            x = x + functional.linear(seen.reshape(rows, -1), out)
            gate, up = functional.linear(self._normalize(x), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        logits = functional.linear(self._normalize(x), self._head)
        self.token_ids.copy_(logits.argmax(-1))

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self._norm, EPSILON)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * self._cos - second * self._sin, second * self._cos + first * self._sin], -1
        )


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """Returns what replays a step as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # weights and cache are still being made
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def measure(shape: Shape, *, num_rows: int, kv_len: int, device: str) -> float:
    """Returns the median seconds of a step, its tokens read by the host."""
    llama = Llama(shape, num_rows=num_rows, kv_len=kv_len, device=device)
    step = capture(llama.step) if device == "cuda" else llama.step
    seconds = []
    for _ in range(NUM_WARM_UP + NUM_STEPS):
        start = time.perf_counter()
        step()
        llama.token_ids.cpu()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[NUM_WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ("VOCAB", "HIDDEN", "LAYERS", "HEADS", "KV_HEADS", "HEAD_DIM", "MLP")
    parser.add_argument("--shape", type=int, nargs=7, required=True, metavar=names)
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--kv-len", type=int, required=True, help="tokens each row holds")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape(*options.shape)
    with torch.inference_mode():
        steps = [
            {
                "rows": rows,
                "step_ms": 1e3
                * measure(shape, num_rows=rows, kv_len=options.kv_len, device=device),
            }
            for rows in options.rows
        ]
    print(json.dumps({"torch": torch.__version__, "device": device, "decode": steps}))


if __name__ == "__main__":
    main()
