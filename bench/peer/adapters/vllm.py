"""vLLM for CPUs, its offline `LLM`, in this one process."""

from typing import Any

import vllm

from bench.peer.adapters.worker import Generate, Prompts, serve_orders


def start(options: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    llm = vllm.LLM(
        options["model"],
        dtype=options["dtype"],
        max_model_len=options["max_model_tokens"],
        max_num_seqs=options["max_seqs"],
        **options.get("arguments", {}),
    )

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        asked = [vllm.TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        results = llm.generate(asked, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return generate, {"vllm": vllm.__version__}


if __name__ == "__main__":
    serve_orders(start)
