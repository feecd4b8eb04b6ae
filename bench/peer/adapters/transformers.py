"""HF transformers: `generate` on the whole batch at once."""

from typing import Any

import torch
import transformers

from bench.peer.adapters.worker import Generate, Prompts, num_threads, serve_orders


def start(options: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(num_threads())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=getattr(torch, options["dtype"])
    )

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        prompt_ids = torch.tensor(prompts)
        with torch.inference_mode():
            ids = model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        outputs: list[list[int]] = ids[:, prompt_ids.shape[1] :].tolist()
        return outputs

    return generate, {"transformers": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    serve_orders(start)
