"""Ways to damage one thing of a checkpoint, each with what the error must name."""

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.gguf_file import open_gguf
from jaxserve.checkpoint.manifest import DIGEST_KEY, TensorRecord, digest_tensors, sign

Damage = Callable[[Path], None]
Header = dict[str, Any]
Q, K, V = (f"model.layers.1.self_attn.{letter}_proj.weight" for letter in "qkv")
GATE, NORM = "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"
SHARDS = [f"model-{i}-of-00003.safetensors" for i in ("00001", "00002", "00003")]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Case:
    """One damage.

    Attributes:
      names: parts of the message, by which the damaged thing can be found.
    """

    title: str
    damage: Damage
    names: tuple[str, ...]


# Files of any kind.


def remove(name: str) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def cut(name: str, num_bytes: int) -> Damage:
    """Leaves so many bytes; a negative number is left out at the end."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:num_bytes])

    return damage


def append(name: str, content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(content)

    return damage


def write(name: str, content: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_text(content)

    return damage


def flip(name: str, offset: int, *, bit: int = 0) -> Damage:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[offset] ^= 1 << bit
        (folder / name).write_bytes(content)

    return damage


def replace(name: str, old: bytes, new: bytes) -> Damage:
    """Changes the first place where `old` stands."""
    assert len(old) == len(new)

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        assert old in content, f"{name} has no {old!r}"
        (folder / name).write_bytes(content.replace(old, new, 1))

    return damage


def swap(one: str, other: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / one).rename(folder / "swapped")
        (folder / other).rename(folder / one)
        (folder / "swapped").rename(folder / other)

    return damage


def overwrite(name: str, other: str) -> Damage:
    def damage(folder: Path) -> None:
        shutil.copy(folder / other, folder / name)

    return damage


def edit_json(name: str, edit: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        edit(content)
        (folder / name).write_text(json.dumps(content))

    return damage


def say(name: str, **values: object) -> Damage:
    """Has a JSON file say something else."""
    return edit_json(name, lambda content: content.update(values))


# safetensors.


def edit_header(edit: Callable[[Header], object], name: str = "model.safetensors") -> Damage:
    """Changes the header and leaves the arrays' bytes as they are."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        text = edit(header)
        encoded = text.encode() if isinstance(text, str) else json.dumps(header).encode()
        (folder / name).write_bytes(
            struct.pack("<Q", len(encoded)) + encoded + content[8 + length :]
        )

    return damage


def edit_tensors(
    edit: Callable[[dict[str, np.ndarray]], object], name: str = "model.safetensors"
) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / name)
        edit(tensors)
        save_file(tensors, folder / name)

    return damage


def set_tensor(tensor: str, change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[tensor] = np.ascontiguousarray(change(tensors[tensor]))

    return edit_tensors(edit)


def _move(header: Header, tensor: str, by: int) -> None:
    header[tensor]["data_offsets"] = [place + by for place in header[tensor]["data_offsets"]]


def _twice(header: Header) -> str:
    text = json.dumps(header)
    return f'{text[:-1]}, "{Q}": {json.dumps(header[Q])}}}'


def _rename(tensors: dict[str, np.ndarray], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


CONFIG_LIES = {
    "vocab_size": (270, "embed_tokens"),
    "hidden_size": (66, "input_layernorm"),
    "num_hidden_layers": (3, "model.layers.2.mlp.up_proj.weight"),
    "num_attention_heads": (4, Q),
    "num_key_value_heads": (4, K),
    "head_dim": (8, Q),
    "intermediate_size": (48, GATE),
}
HF = [
    Case(title="no tensor", damage=edit_tensors(lambda t: t.pop(Q)), names=("missing", Q)),
    Case(
        title="another name",
        damage=edit_tensors(lambda t: _rename(t, NORM, "model.norm.weigth")),
        names=(NORM, "model.norm.weigth"),
    ),
    Case(
        title="stray tensor",
        damage=edit_tensors(lambda t: t.update(stray=np.ones(3, np.float32))),
        names=("unexpected", "stray"),
    ),
    Case(title="transposed", damage=set_tensor(GATE, np.transpose), names=(GATE, "[64, 96]")),
    Case(title="a row less", damage=set_tensor(V, lambda x: x[1:]), names=(V, "[31, 64]")),
    Case(title="flat", damage=set_tensor(V, np.ravel), names=(V, "[2048]")),
    Case(title="int8", damage=set_tensor(NORM, lambda x: x.astype(np.int8)), names=(NORM, "I8")),
    Case(title="float64", damage=set_tensor(Q, lambda x: x.astype(np.float64)), names=(Q, "F64")),
    Case(
        title="the end cut off",
        damage=cut("model.safetensors", -8),
        names=("model.safetensors", "cut off", ".weight"),
    ),
    Case(
        title="half of it",
        damage=cut("model.safetensors", 100_000),
        names=("model.safetensors", "cut off", NORM),
    ),
    Case(title="no whole header", damage=cut("model.safetensors", 500), names=("model.safetens",)),
    Case(title="no header", damage=cut("model.safetensors", 3), names=("model.safetensors",)),
    Case(title="empty file", damage=cut("model.safetensors", 0), names=("model.safetensors",)),
    Case(
        title="header length", damage=flip("model.safetensors", 1, bit=3), names=("model.safetens",)
    ),
    Case(title="header text", damage=flip("model.safetensors", 8), names=("model.safetensors",)),
    Case(
        title="header name",
        damage=replace("model.safetensors", b"model.norm.weight", b"model.norm.wdight"),
        names=(NORM, "model.norm.wdight"),
    ),
    Case(title="name twice", damage=edit_header(_twice), names=(Q, "twice")),
    Case(title="overlap", damage=edit_header(lambda h: _move(h, Q, -4)), names=(Q, "overlaps")),
    Case(title="gap", damage=edit_header(lambda h: _move(h, Q, 4)), names=(Q, "gap")),
    Case(
        title="place before the file",
        damage=edit_header(lambda h: _move(h, Q, -(10**9))),
        names=(Q,),
    ),
    Case(
        title="shape of another size",
        damage=edit_header(lambda h: h[Q].update(shape=[128, 63])),
        names=(Q,),
    ),
    Case(
        title="shape of the same size",
        damage=edit_header(lambda h: h[Q].update(shape=[64, 128])),
        names=(Q, "[64, 128]"),
    ),
    Case(
        title="dtype of another size", damage=edit_header(lambda h: h[Q].update(dtype="F16")),
        names=(Q,),
    ),
    Case(
        title="unknown dtype", damage=edit_header(lambda h: h[Q].update(dtype="F37")),
        names=(Q, "F37"),
    ),
    Case(
        title="entry without a shape", damage=edit_header(lambda h: h[Q].pop("shape")), names=(Q,)
    ),
    Case(
        title="bytes behind the last",
        damage=append("model.safetensors", b"more"),
        names=("model.safetensors", "4 bytes behind"),
    ),
    Case(title="no weights", damage=remove("model.safetensors"), names=("model.safetensors",)),
    Case(title="no config", damage=remove("config.json"), names=("config.json",)),
    Case(title="cut config", damage=cut("config.json", 60), names=("config.json",)),
    Case(
        title="tied without being so",
        damage=edit_tensors(lambda t: t.pop("lm_head.weight")),
        names=("lm_head.weight",),
    ),
    Case(title="no tokenizer", damage=remove("tokenizer.json"), names=("tokenizer.json",)),
    Case(title="cut tokenizer", damage=cut("tokenizer.json", -9), names=("tokenizer.json",)),
    Case(
        title="cut tokenizer_config",
        damage=cut("tokenizer_config.json", 20),
        names=("tokenizer_config.json",),
    ),
    Case(
        title="id of a token out of range",
        damage=say("tokenizer_config.json", added_tokens_decoder={"99999": {"content": "<s>"}}),
        names=("tokenizer_config.json", "<s>", "99999"),
    ),
    Case(
        title="EOS out of range",
        damage=say("config.json", eos_token_id=-1),
        names=("config.json", "eos_token_id"),
    ),
    Case(
        title="a default out of range",
        damage=write("generation_config.json", '{"temperature": -1}'),
        names=("generation_config.json", "temperature"),
    ),
    *(
        Case(
            title=f"{name} {value}", damage=say("config.json", **{name: value}), names=(tensor,)
        )
        for name, (value, tensor) in CONFIG_LIES.items()
    ),
]  # fmt: skip

INDEX = "model.safetensors.index.json"
SHARDED = [
    Case(title="no shard", damage=remove(SHARDS[1]), names=(SHARDS[1], "missing")),
    Case(title="cut shard", damage=cut(SHARDS[2], -8), names=(SHARDS[2], "cut off")),
    Case(title="swapped shards", damage=swap(SHARDS[0], SHARDS[1]), names=(SHARDS[0], SHARDS[1])),
    Case(
        title="a shard in place of another",
        damage=overwrite(SHARDS[1], SHARDS[0]),
        names=(SHARDS[1], "embed_tokens"),
    ),
    Case(
        title="tensor in two shards",
        damage=edit_tensors(lambda t: t.update({NORM: np.ones(64, np.float32)}), SHARDS[0]),
        names=(NORM, SHARDS[0]),
    ),
    Case(
        title="another name in a shard",
        damage=edit_tensors(lambda t: _rename(t, next(iter(t)), "another"), SHARDS[0]),
        names=("another", SHARDS[0]),
    ),
    Case(
        title="index of an absent tensor",
        damage=edit_json(INDEX, lambda i: i["weight_map"].update(absent=SHARDS[0])),
        names=("absent", SHARDS[0]),
    ),
    Case(
        title="index of an absent file",
        damage=edit_json(INDEX, lambda i: i["weight_map"].update({NORM: "absent.safetensors"})),
        names=(NORM, "absent.safetensors"),
    ),
    Case(
        title="unlisted tensor",
        damage=edit_json(INDEX, lambda i: i["weight_map"].pop(NORM)),
        names=(NORM, "not listed"),
    ),
    Case(title="cut index", damage=cut(INDEX, 100), names=(INDEX,)),
    Case(title="index without a map", damage=write(INDEX, "{}"), names=(INDEX,)),
    Case(
        title="file outside the folder",
        damage=edit_json(INDEX, lambda i: i["weight_map"].update({NORM: "../x.safetensors"})),
        names=(NORM, "../x.safetensors"),
    ),
    Case(
        title="name of a file that no disk takes",
        damage=edit_json(INDEX, lambda i: i["weight_map"].update({NORM: "é" * 150})),
        names=(NORM, "éé"),
    ),
]


def edit_manifest(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """Changes the manifest and signs it again, as a faulty writer would."""

    def damage(folder: Path) -> None:
        fields = json.loads((folder / "manifest.json").read_text())
        del fields[DIGEST_KEY]
        edit(fields)
        (folder / "manifest.json").write_text(json.dumps(sign(fields)))

    return damage


def say_of_model(name: str, value: object) -> Damage:
    return edit_manifest(lambda fields: fields["model"].update({name: value}))


def _in_data(then: Callable[[str], Damage]) -> Damage:
    """Damages the file that holds most of the first part's arrays."""

    def damage(folder: Path) -> None:
        files = (folder / "params" / "0000").rglob("d/*")
        largest = max(files, key=lambda file: file.stat().st_size)
        then(largest.relative_to(folder).as_posix())(folder)

    return damage


def _exchange(manifest: dict[str, Any], one: str, other: str) -> None:
    tensors = manifest["tensors"]
    tensors[one], tensors[other] = tensors[other], tensors[one]
    records = {path: TensorRecord(**tensor) for path, tensor in tensors.items()}
    manifest["weights_digest"] = digest_tensors(records)


PATH = "layers/1/q_DNH"
BUNDLE = [
    Case(title="no manifest", damage=remove("manifest.json"), names=("manifest.json",)),
    Case(title="cut manifest", damage=cut("manifest.json", -20), names=("manifest.json",)),
    Case(title="empty manifest", damage=cut("manifest.json", 0), names=("manifest.json",)),
    Case(
        title="another version",
        damage=say("manifest.json", format_version=2),
        names=("manifest.json", "format_version"),
    ),
    Case(
        title="an entry was changed",
        damage=replace("manifest.json", b'"norm_eps": 1e-05', b'"norm_eps": 1e-06'),
        names=("manifest.json",),
    ),
    Case(
        title="no entry of the model",
        damage=edit_manifest(lambda m: m["model"].pop("final_soft_cap")),
        names=("manifest.json", "final_soft_cap"),
    ),
    *(
        Case(
            title=f"{name} {value}",
            damage=say_of_model(name, value),
            names=("manifest.json", tensor),
        )
        for name, value, tensor in (
            ("vocab_size", 200, "embedding_VD"),
            ("hidden_size", 66, "final_norm_D"),
            ("num_heads", 4, PATH),
            ("num_kv_heads", 4, "layers/1/k_DKH"),
            ("head_dim", 8, PATH),
            ("mlp_size", 48, "layers/1/gate_DF"),
            ("tied_head", True, "head_VD"),
            ("qkv_bias", True, "layers/1/q_bias_NH"),
            ("qk_norm", "head", "layers/1/q_norm_H"),
        )
    ),
    Case(
        title="no tensor",
        damage=edit_manifest(lambda m: m["tensors"].pop(PATH)),
        names=("missing", PATH),
    ),
    Case(
        title="stray tensor",
        damage=edit_manifest(lambda m: m["tensors"].update(stray=m["tensors"][PATH])),
        names=("unexpected", "stray"),
    ),
    Case(
        title="another shape",
        damage=edit_manifest(lambda m: m["tensors"][PATH].update(shape=[8, 64, 16])),
        names=(PATH, "[8, 64, 16]"),
    ),
    Case(
        title="another dtype",
        damage=edit_manifest(lambda m: m["tensors"][PATH].update(dtype="bfloat16")),
        names=(PATH, "bfloat16"),
    ),
    Case(
        title="two tensors exchanged",
        damage=edit_manifest(lambda m: _exchange(m, "layers/0/gate_DF", "layers/0/up_DF")),
        names=("layers/0/gate_DF",),
    ),
    Case(
        title="digest of other weights",
        damage=edit_manifest(lambda m: m.update(weights_digest="0" * 64)),
        names=("manifest.json", "weights_digest"),
    ),
    Case(
        title="part that is none",
        damage=edit_manifest(lambda m: m["tensors"][PATH].update(part="params")),
        names=("params is no Orbax checkpoint",),
    ),
    Case(
        title="tensor of another part",
        damage=edit_manifest(lambda m: m["tensors"][PATH].update(part="params/0000")),
        names=(PATH,),
    ),
    Case(
        title="sum of a tensor",
        damage=edit_manifest(lambda m: m["tensors"][PATH].update(crc32=1)),
        names=(PATH, "sum"),
    ),
    Case(
        title="digest of the tokenizer",
        damage=edit_manifest(lambda m: m.update(tokenizer_digest="0" * 64)),
        names=("tokenizer.json",),
    ),
    Case(
        title="another EOS",
        damage=edit_manifest(lambda m: m["eos_ids"].append(7)),
        names=("tokenizer.json",),
    ),
    Case(title="no part", damage=remove("params/0001"), names=("params/0001", "missing")),
    Case(
        title="exchanged parts",
        damage=swap("params/0000", "params/0001"),
        names=("params/0000", "params/0001"),
    ),
    Case(title="no arrays", damage=_in_data(remove), names=("params/0000", "missing")),
    Case(title="cut arrays", damage=_in_data(lambda f: cut(f, -1)), names=("params/0000", "bytes")),
    Case(title="a bit", damage=_in_data(lambda f: flip(f, 5000)), names=("params/0000", "content")),
    Case(
        title="tree of a part",
        damage=flip("params/0000/_METADATA", 40),
        names=("params/0000/_METADATA",),
    ),
    Case(
        title="no tree of a part",
        damage=remove("params/0000/_METADATA"),
        names=("params/0000/_METADATA",),
    ),
    Case(
        title="root of a part",
        damage=flip("params/0000/manifest.ocdbt", 20),
        names=("params/0000/manifest.ocdbt",),
    ),
    Case(title="stray file", damage=write("params/stray", "x"), names=("params/stray",)),
    Case(
        title="stray template",
        damage=write("chat_template.jinja", "x"),
        names=("chat_template.jinja",),
    ),
    Case(title="no tokenizer", damage=remove("tokenizer.json"), names=("tokenizer.json",)),
    Case(
        title="another token",
        damage=replace("tokenizer.json", b"</s>", b"</t>"),
        names=("tokenizer.json",),
    ),
    Case(
        title="another BOS policy",
        damage=replace("tokenizer_config.json", b": true", b":false"),
        names=("tokenizer_config.json",),
    ),
]


# GGUF.

GGUF_FILE = "model.gguf"
GGUF_Q, GGUF_GATE = "blk.1.attn_q.weight", "blk.0.ffn_gate.weight"
UINT32 = 4


def set_key(key: str, value: int) -> Damage:
    """Gives a uint32 of the metadata another value."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / GGUF_FILE).read_bytes())
        place = content.index(key.encode() + struct.pack("<I", UINT32)) + len(key) + 4
        struct.pack_into("<I", content, place, value)
        (folder / GGUF_FILE).write_bytes(content)

    return damage


def edit_entry(
    name: str,
    *,
    dims: tuple[int, ...] | None = None,
    type_id: int | None = None,
    offset: int | None = None,
) -> Damage:
    """Changes a tensor's entry in the table; `dims` are in the file's order."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / GGUF_FILE).read_bytes())
        place = content.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        (num_dims,) = struct.unpack_from("<I", content, place)
        place += 4
        if dims is not None:
            struct.pack_into(f"<{len(dims)}Q", content, place, *dims)
        place += 8 * num_dims
        if type_id is not None:
            struct.pack_into("<I", content, place, type_id)
        if offset is not None:
            struct.pack_into("<Q", content, place + 4, offset)
        (folder / GGUF_FILE).write_bytes(content)

    return damage


def move_last(by: int) -> Damage:
    """Gives the last tensor a later place, in a file that is long enough for it."""

    def damage(folder: Path) -> None:
        file = open_gguf(folder / GGUF_FILE)
        last = max(file.tensors.values(), key=lambda entry: entry.offset)
        append(GGUF_FILE, bytes(by))(folder)
        edit_entry(last.name, offset=last.offset - file.data_start + by)(folder)

    return damage


def rename_in_gguf(old: str, new: str) -> Damage:
    return replace(GGUF_FILE, old.encode(), new.encode())


GGUF = [
    Case(title="empty file", damage=cut(GGUF_FILE, 0), names=(GGUF_FILE,)),
    Case(title="magic", damage=flip(GGUF_FILE, 0), names=(GGUF_FILE, "not a GGUF file")),
    Case(title="version", damage=flip(GGUF_FILE, 4, bit=3), names=(GGUF_FILE, "version 11")),
    Case(title="number of tensors", damage=flip(GGUF_FILE, 8, bit=6), names=(GGUF_FILE,)),
    Case(title="number of keys", damage=flip(GGUF_FILE, 16, bit=6), names=(GGUF_FILE,)),
    Case(title="cut metadata", damage=cut(GGUF_FILE, 300), names=(GGUF_FILE,)),
    Case(title="cut table", damage=cut(GGUF_FILE, 9000), names=(GGUF_FILE,)),
    Case(title="the end cut off", damage=cut(GGUF_FILE, -40), names=("cut off", ".weight")),
    Case(
        title="half of it",
        damage=cut(GGUF_FILE, 200_000),
        names=("cut off", "blk.1.ffn_down.weight"),
    ),
    Case(
        title="another name",
        damage=rename_in_gguf(GGUF_Q, "blk.1.attn_x.weight"),
        names=(GGUF_Q, "blk.1.attn_x.weight"),
    ),
    Case(
        title="name twice",
        damage=rename_in_gguf("blk.1.attn_k.weight", "blk.1.attn_v.weight"),
        names=("blk.1.attn_v.weight", "twice"),
    ),
    Case(title="transposed", damage=edit_entry(GGUF_GATE, dims=(96, 64)), names=(GGUF_GATE,)),
    Case(title="a row less", damage=edit_entry(GGUF_GATE, dims=(64, 95)), names=(GGUF_GATE,)),
    Case(title="no dimension", damage=edit_entry(GGUF_GATE, dims=(0, 96)), names=(GGUF_GATE,)),
    Case(title="int8", damage=edit_entry(GGUF_Q, type_id=24), names=(GGUF_Q, "I8")),
    Case(title="unknown type", damage=edit_entry(GGUF_Q, type_id=99), names=(GGUF_Q, "99")),
    Case(title="larger type", damage=edit_entry(GGUF_Q, type_id=28), names=(GGUF_Q, "F64")),
    Case(title="place past the end", damage=edit_entry(GGUF_Q, offset=1 << 40), names=(GGUF_Q,)),
    Case(title="place of another", damage=edit_entry(GGUF_Q, offset=0), names=(GGUF_Q,)),
    Case(title="place between", damage=edit_entry(GGUF_Q, offset=5), names=(GGUF_Q,)),
    Case(title="gap", damage=move_last(32), names=("blk.1.ffn_down.weight", "gap")),
    Case(title="odd place", damage=move_last(4), names=("blk.1.ffn_down.weight", "gap")),
    *(
        Case(title=f"{key} {value}", damage=set_key(key, value), names=(name,))
        for key, value, name in (
            ("llama.vocab_size", 200, "token_embd.weight"),
            ("llama.embedding_length", 66, "blk.0.attn_norm.weight"),
            ("llama.block_count", 1, GGUF_Q),
            ("llama.block_count", 3, "blk.2.attn_q.weight"),
            ("llama.feed_forward_length", 48, GGUF_GATE),
            ("llama.attention.head_count", 4, GGUF_Q),
            ("llama.attention.head_count_kv", 4, "blk.1.attn_k.weight"),
            ("tokenizer.ggml.bos_token_id", 99_999, "bos_token_id"),
            ("tokenizer.ggml.eos_token_id", 99_999, "eos_token_id"),
        )
    ),
    Case(
        title="another architecture",
        damage=rename_in_gguf("llama", "lxama"),
        names=("lxama",),
    ),
    Case(
        title="no tokens",
        damage=rename_in_gguf("tokenizer.ggml.tokens", "tokenizer.ggml.tokenx"),
        names=("tokenizer.ggml.tokens",),
    ),
    Case(
        title="no merges",
        damage=rename_in_gguf("tokenizer.ggml.merges", "tokenizer.ggml.mergex"),
        names=("tokenizer.ggml.merges",),
    ),
    Case(
        title="another kind of vocabulary", damage=rename_in_gguf("gpt2", "gpt9"), names=("gpt9",)
    ),
    Case(title="another pre-tokenizer", damage=rename_in_gguf("gpt-2", "gpt-9"), names=("gpt-9",)),
    Case(
        title="no size",
        damage=rename_in_gguf("llama.embedding_length", "llama.embedding_lengtx"),
        names=("llama.embedding_length",),
    ),
]
