"""Token ids of llama.cpp's vocabularies: golden ones, and llama.cpp's own on random texts.

A vocabulary passes when every golden text has exactly its ids, and the ids' text, given in pieces
of any size, is the text again. Vocabularies of other kinds must be refused by name.
"""

import argparse
import json
import random
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"
# Kinds that are not supported; any other refusal is a failure.
REFUSED = {"bert-bge": "'bert' (WordPiece)", "nomic-bert-moe": "'t5' (SentencePiece unigram)"}
NUM_RANDOM_TEXTS = 2000
# Where llama.cpp leaves the vocabulary's own tokenizer (a Hugging Face one), and we follow that:
# words it takes for control tokens by their spelling; text that the vocabulary composes first;
# white space beyond ASCII after a special token, and before the end of a split.
EXCUSED = {
    "aquila": ("<|endoftext|>",),
    "qwen2": ("</s>",),
    "qwen35": ("</s>",),
    "phi-3": ("\u00a0", "\u3000"),
    "deepseek-llm": ("\u3000",),
}
COMPOSES = {"qwen2"}
WORDS = (
    "the", "Hello", " world", "123", "4567", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "é",
    "e\u0301", "日本語", "漢字", "가나다", "ที่", "हिन्दी", "مرحبا", "🌶", "👨‍👩‍👧", "🇩🇪", "'s", "'LL",
    "don't", "<s>", "</s>", "<|im_end|>", "<|endoftext|>", "<bos>", "<0x0A>", "<unk>", "▁", "▁▁",
    "Ġ", "C++", "==", "=====", "!!", "...", "。", "½", "Ⅷ", "\u00a0", "\u200b", "\u3000", "_",
    "__init__", "aa",
    "aaa", "ababababab", "{}", "();", "//", "http://x.y/z?q=1", "\x00", "\x7f", "\ufffd", "ß", "İ",
    "camelCaseWord", "ALLCAPS", "MixedCASE", "٣٤", "\ue000", "ﬁ",
)  # fmt: skip


def vocabularies(models: Path) -> list[tuple[str, Path]]:
    """Returns name and path of each; without any, nothing would be judged."""
    found = sorted(models.glob("ggml-vocab-*.gguf"))
    if not found:
        raise SystemExit(f"judges/vocab: no vocabularies in {models}")
    return [(path.stem.removeprefix("ggml-vocab-"), path) for path in found]


def read_goldens(path: Path) -> list[tuple[str, list[int]]] | None:
    """Returns the golden texts and ids beside a vocabulary; None if it has none."""
    texts_path = path.with_name(path.name + ".inp")
    if not texts_path.exists():
        return None
    texts = texts_path.read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)
    lines = path.with_name(path.name + ".out").read_text().splitlines()
    return [
        (text, [int(id) for id in line.split()]) for text, line in zip(texts, lines, strict=True)
    ]


def judge_goldens(models: Path) -> int:
    """Prints a line for each vocabulary; returns how many did not do what they should."""
    from jaxserve.checkpoint.gguf_file import open_gguf
    from jaxserve.checkpoint.gguf_tokenizer import read_tokenizer
    from jaxserve.errors import CheckpointError

    faults = 0
    for name, path in vocabularies(models):
        try:
            tokenizer = read_tokenizer(open_gguf(path))
        except CheckpointError as error:
            is_right = name in REFUSED and REFUSED[name] in str(error)
            faults += not is_right
            print(f"{name:16} refused{'' if is_right else ', but should be read'}: {error.args[0]}")
            continue
        if name in REFUSED:
            faults += 1
            print(f"{name:16} was read, but should be refused")
            continue
        goldens = read_goldens(path)
        if goldens is None:
            print(f"{name:16} loaded; the package has no golden ids for it")
            continue
        wrong = [
            text for text, ids in goldens if tokenizer.encode(text, add_special_tokens=False) != ids
        ]
        lossy = [text for text, ids in goldens if not streams_back(tokenizer, text, ids)]
        faults += bool(wrong or lossy)
        print(
            f"{name:16} {len(goldens) - len(wrong)} of {len(goldens)} texts have the golden ids, "
            f"{len(goldens) - len(lossy)} come back from them"
        )
        for text in [*wrong, *lossy]:
            print(f"    wrong: {text[:80]!r}")
    return faults


def streams_back(tokenizer: "Tokenizer", text: str, ids: list[int]) -> bool:
    """Whether the ids' text is the text, at once and in pieces of 1, 2, 3 tokens."""
    from jaxserve.text.detokenizer import Detokenizer

    texts = {tokenizer.decode(ids, skip_special_tokens=False)}
    for size in (1, 2, 3):
        decoder = Detokenizer(tokenizer, skip_special_tokens=False, prompt=())
        pieces = [decoder.push(ids[i : i + size]) for i in range(0, len(ids), size)]
        texts.add("".join([*pieces, decoder.flush()]))
    return texts == {text}


def is_excused(name: str, text: str) -> bool:
    composed = unicodedata.normalize("NFC", text)
    return any(word in text for word in EXCUSED.get(name, ())) or (
        name in COMPOSES and composed != text
    )


def make_texts() -> list[str]:
    """Random texts of hard words, random characters, and runs."""
    rng = random.Random(58)
    texts = ["".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(NUM_RANDOM_TEXTS)]
    ranges = [(32, 127), (0x80, 0x800), (0x800, 0xD800), (0x1F300, 0x1FB00)]
    for _ in range(NUM_RANDOM_TEXTS // 5):
        codes = [rng.randrange(*rng.choice(ranges)) for _ in range(rng.randint(1, 20))]
        texts.append("".join(map(chr, codes)))
    texts += [
        char * size + end for char in " =\n\ta-" for size in range(1, 40) for end in ("", "b")
    ]
    return texts


def run_llamacpp(models: Path) -> dict[str, list[list[int]]]:
    """Returns llama.cpp's ids of the random texts, special tokens parsed."""
    import llama_cpp

    ids = {}
    for name, path in vocabularies(models):
        if name not in REFUSED:
            llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            vocab = llama_cpp.llama_model_get_vocab(llama.model)
            ids[name] = [_tokenize(vocab, text.encode()) for text in make_texts()]
    return ids


def _tokenize(vocab: int, text: bytes) -> list[int]:
    import llama_cpp

    size = len(text) + 8
    ids = (llama_cpp.llama_token * size)()
    count = llama_cpp.llama_tokenize(vocab, text, len(text), ids, size, False, True)
    return list(ids[:count])


def compare(models: Path, peer: dict[str, list[list[int]]]) -> int:
    """Prints how many random texts have llama.cpp's ids; returns how many differ unexcused."""
    from jaxserve.checkpoint.gguf_file import open_gguf
    from jaxserve.checkpoint.gguf_tokenizer import read_tokenizer

    faults = 0
    texts = make_texts()
    for name, path in vocabularies(models):
        if name in REFUSED:
            continue
        tokenizer = read_tokenizer(open_gguf(path))
        pairs = zip(texts, peer[name], strict=True)
        differ = [t for t, ids in pairs if tokenizer.encode(t, add_special_tokens=False) != ids]
        wrong = [text for text in differ if not is_excused(name, text)]
        faults += len(wrong)
        print(
            f"{name:16} {len(texts) - len(differ)} of {len(texts)} random texts have llama.cpp's "
            f"ids, {len(differ) - len(wrong)} differ as known, {len(wrong)} are wrong"
        )
        for text in wrong[:5]:
            print(f"    wrong: {text[:80]!r}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["goldens", "llamacpp", "compare"])
    parser.add_argument("models", type=Path)
    parser.add_argument("peer", nargs="?", type=Path, help="llama.cpp's ids")
    arguments = parser.parse_args()
    match arguments.part:
        case "llamacpp":
            arguments.peer.write_text(json.dumps(run_llamacpp(arguments.models)))
            return 0
        case "compare":
            faults = compare(arguments.models, json.loads(arguments.peer.read_text()))
        case _:
            faults = judge_goldens(arguments.models)
    print(f"{arguments.part}: {faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
