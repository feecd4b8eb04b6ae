"""This engine, through its Python API."""

from importlib.metadata import version
from typing import Any

from bench.peer.adapters.worker import Generate, Prompts, serve_orders
from jaxserve import LLM
from jaxserve.config import load_config
from jaxserve.request import SamplingParams


def start(options: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    llm = LLM(options["model"], load_config(flags=options["settings"]))

    def generate(prompts: Prompts, num_tokens: int) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        done = llm.generate([tuple(prompt) for prompt in prompts], params)
        return [tuple(completion.token_ids) for completion in done]

    return generate, {name: version(name) for name in ("jax", "jaxlib")}


if __name__ == "__main__":
    serve_orders(start)
