"""llama.cpp through its C API, as its own `llama-batched-bench` drives it, on given prompts.

Prompts go in by n_batch tokens, then all sequences step together; each takes its largest logit. No
server, sampler or detokenizer is in the way.
"""

from typing import Any

import llama_cpp
import numpy as np

from bench.peer.adapters.worker import Generate, Prompts, num_threads, serve_orders


class Batch:
    """A llama_batch of at most so many tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.raw = llama_cpp.llama_batch_init(max_tokens, 0, 1)

    def clear(self) -> None:
        self.raw.n_tokens = 0

    def add(self, token: int, *, position: int, sequence: int, wants_logits: bool) -> None:
        place = self.raw.n_tokens
        self.raw.token[place] = token
        self.raw.pos[place] = position
        self.raw.n_seq_id[place] = 1
        self.raw.seq_id[place][0] = sequence
        self.raw.logits[place] = wants_logits
        self.raw.n_tokens = place + 1


def start(options: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        options["model"].encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = options["max_seqs"]
    params.n_ctx = options["max_seqs"] * options["max_model_tokens"]
    params.n_threads = params.n_threads_batch = num_threads()
    context = llama_cpp.llama_init_from_model(model, params)
    if context is None:
        raise SystemExit("llama.cpp made no context")
    num_ids = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = Batch(llama_cpp.llama_n_batch(context))

    def decode() -> None:
        if status := llama_cpp.llama_decode(context, batch.raw):
            raise RuntimeError(f"llama_decode returned {status}")

    def best_id(place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, place)
        return int(np.ctypeslib.as_array(logits, shape=(num_ids,)).argmax())

    def read_prompts(prompts: Prompts) -> list[int]:
        """Returns the first token of each."""
        first_ids: list[int] = []
        asked: list[int] = []  # places of this batch that have logits

        def flush() -> None:
            decode()
            first_ids.extend(map(best_id, asked))
            batch.clear()
            asked.clear()

        batch.clear()
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                is_last = position == len(prompt) - 1
                if is_last:
                    asked.append(batch.raw.n_tokens)
                batch.add(token, position=position, sequence=sequence, wants_logits=is_last)
                if batch.raw.n_tokens == batch.max_tokens:
                    flush()
        if batch.raw.n_tokens:
            flush()
        return first_ids

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        outputs = [[token] for token in read_prompts(prompts)]
        for step in range(num_tokens - 1):
            batch.clear()
            for sequence, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                batch.add(
                    output[-1],
                    position=len(prompt) + step,
                    sequence=sequence,
                    wants_logits=True,
                )
            decode()
            for sequence, output in enumerate(outputs):
                output.append(best_id(sequence))
        return outputs

    return generate, {"llama-cpp-python": llama_cpp.__version__}


if __name__ == "__main__":
    serve_orders(start)
