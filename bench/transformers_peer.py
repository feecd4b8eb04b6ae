"""HF transformers behind a line protocol, for `vs_transformers.py`. Needs torch and gguf.

Reads one JSON object a line: {"dtype": "float32", "prompts": [[ids], …], "num_tokens": n};
answers {"seconds": s}. Both dtypes stay loaded, so that a round costs only its own work.
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers


def main() -> None:
    gguf_path = Path(sys.argv[1])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    models = {
        dtype: transformers.AutoModelForCausalLM.from_pretrained(
            gguf_path.parent, gguf_file=gguf_path.name, dtype=getattr(torch, dtype)
        )
        for dtype in ("float32", "bfloat16")
    }
    print(json.dumps({"ready": transformers.__version__, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        prompt_ids = torch.tensor(order["prompts"])
        start = time.perf_counter()
        with torch.inference_mode():
            out = models[order["dtype"]].generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                do_sample=False,
                min_new_tokens=order["num_tokens"],
                max_new_tokens=order["num_tokens"],
                eos_token_id=None,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        assert out.shape[1] == prompt_ids.shape[1] + order["num_tokens"]
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
