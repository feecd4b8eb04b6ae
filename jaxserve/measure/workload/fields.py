"""The objects of a workload file, read strictly: what is given, what is allowed, by name."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from jaxserve.errors import ConfigError
from jaxserve.measure.limits import read_limits
from jaxserve.measure.workload.entry import (
    FORMAT_VERSION,
    Header,
    Prompt,
    Recipe,
    WorkloadEntry,
)
from jaxserve.measure.workload.values import (
    MAX_COUNT,
    MAX_SECONDS,
    FieldError,
    check_names,
    check_unicode,
    number,
    shorten,
    text,
    whole,
    word,
)

MARK: Final = "jaxserve_workload"  # the header's key, with the format's version

# What an entry may set of the sampling: type, least and greatest.
SAMPLING: Final[Mapping[str, tuple[Literal["number", "whole", "flag"], float, float]]] = {
    "temperature": ("number", 0, 1e6),
    "top_p": ("number", 0, 1),
    "top_k": ("whole", 0, MAX_COUNT),
    "min_p": ("number", 0, 1),
    "presence_penalty": ("number", -2, 2),
    "frequency_penalty": ("number", -2, 2),
    "repetition_penalty": ("number", 1e-6, 1e6),
    "seed": ("whole", 0, (1 << 64) - 1),
    "max_tokens": ("whole", 1, MAX_COUNT),
    "min_tokens": ("whole", 0, MAX_COUNT),
    "ignore_eos": ("flag", 0, 1),
}
_PROMPT_FIELDS: Final = ("prompt_tokens", "token_ids", "text")
_ENTRY_FIELDS: Final = (
    "at_s", *_PROMPT_FIELDS, "block_tokens", "blocks", "prompt_class", "wanted_tokens",
    "deadline_s", "priority", "sampling", "group",
)  # fmt: skip
_HEADER_FIELDS: Final = (
    MARK, "name", "arrivals", "concurrency", "prompts", "seed", "source", "licence", "parameters",
    "lineage", "limits",
)  # fmt: skip


def read_header(found: Mapping[str, Any]) -> Header:
    """Returns the header of its object.

    Raises:
      FieldError: names the key, its value and what is allowed.
    """
    version = found.get(MARK)
    if version is None:
        raise FieldError(
            f"it has no {MARK}, so this is no workload; `jaxserve workload import` reads traces"
        )
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise FieldError(f"{MARK} is {shorten(version)}, but this version reads {FORMAT_VERSION}")
    check_names(found, _HEADER_FIELDS)
    arrivals = word(found, "arrivals", ("open", "closed"), "open")
    concurrency = found.get("concurrency")
    if arrivals == "closed":
        concurrency = whole(concurrency, "concurrency", low=1, high=1 << 20)
    elif concurrency is not None:
        raise FieldError("concurrency is set, but only a closed loop has one; leave it out")
    lineage = found.get("lineage", [])
    if not isinstance(lineage, list) or not all(isinstance(step, dict) for step in lineage):
        raise FieldError("lineage must be a list of objects")
    parameters = found.get("parameters", {})
    if not isinstance(parameters, dict):
        raise FieldError(f"parameters is {shorten(parameters)}, but must be an object")
    return Header(
        name=text(found, "name", ""),
        arrivals=arrivals,  # type: ignore[arg-type]  # one of the two words
        concurrency=concurrency,
        prompts=word(found, "prompts", ("unique", "fixed"), "unique"),  # type: ignore[arg-type]
        seed=whole(found.get("seed", 0), "seed", low=0, high=(1 << 64) - 1),
        source=text(found, "source", ""),
        licence=text(found, "licence", ""),
        parameters=parameters,
        lineage=tuple(lineage),
        limits=_read_limits(found.get("limits", {})),
    )


def header_facts(header: Header) -> dict[str, object]:
    """Returns the header's object in the file."""
    facts: dict[str, object] = {
        MARK: FORMAT_VERSION,
        "name": header.name,
        "arrivals": header.arrivals,
        "prompts": header.prompts,
        "seed": header.seed,
        "source": header.source,
        "licence": header.licence,
        "parameters": dict(header.parameters),
        "lineage": [dict(step) for step in header.lineage],
    }
    if header.concurrency is not None:
        facts["concurrency"] = header.concurrency
    if header.limits:
        facts["limits"] = {name: list(words) for name, words in header.limits.items()}
    return facts


def read_entry(found: Mapping[str, Any], index: int) -> WorkloadEntry:
    """Returns the entry of its object.

    Raises:
      FieldError: names the key, its value and what is allowed.
    """
    check_names(found, _ENTRY_FIELDS)
    wanted_tokens = found.get("wanted_tokens")
    if wanted_tokens is not None:
        wanted_tokens = whole(wanted_tokens, "wanted_tokens", low=1)
    deadline_s = found.get("deadline_s")
    if deadline_s is not None:
        deadline_s = number(deadline_s, "deadline_s", low=1e-6, high=MAX_SECONDS)
    sampling = _read_sampling(found.get("sampling", {}))
    clash = sampling.keys() & {"max_tokens", "min_tokens", "ignore_eos"}
    if wanted_tokens is not None and clash:
        raise FieldError(
            f"wanted_tokens and sampling.{min(clash)} are set, but wanted_tokens decides the "
            "length alone; leave one out"
        )
    return WorkloadEntry(
        index=index,
        at_s=number(found.get("at_s"), "at_s", low=0, high=MAX_SECONDS),
        prompt=_read_prompt(found),
        prompt_class=text(found, "prompt_class", ""),
        wanted_tokens=wanted_tokens,
        deadline_s=deadline_s,
        priority=whole(found.get("priority", 0), "priority", low=-(1 << 31), high=MAX_COUNT),
        sampling=sampling,
        group=text(found, "group", ""),
    )


def _read_prompt(found: Mapping[str, Any]) -> Prompt:
    given = [name for name in _PROMPT_FIELDS if name in found]
    if len(given) != 1:
        what = " and ".join(given) or "none"
        raise FieldError(f"of {', '.join(_PROMPT_FIELDS)} it has {what}, but must have one")
    if given != ["prompt_tokens"] and ("blocks" in found or "block_tokens" in found):
        raise FieldError(f"blocks go with prompt_tokens, not with {given[0]}; leave them out")
    match given[0]:
        case "text":
            prompt = text(found, "text", "")
            if not prompt:
                raise FieldError("text is empty, but a prompt has at least one token")
            return prompt
        case "token_ids":
            return _read_ids(found["token_ids"])
        case _:
            return _read_recipe(found)


def _read_recipe(found: Mapping[str, Any]) -> Recipe:
    num_tokens = whole(found["prompt_tokens"], "prompt_tokens", low=1)
    blocks = found.get("blocks", [])
    if not isinstance(blocks, list) or not all(isinstance(key, str) and key for key in blocks):
        raise FieldError(f"blocks is {shorten(blocks)}, but must be a list of texts, not empty")
    for key in blocks:
        check_unicode(key, "blocks")
    if not blocks:
        if "block_tokens" in found:
            raise FieldError("block_tokens is set without blocks; leave it out")
        return Recipe(num_tokens=num_tokens)
    block_tokens = number(found.get("block_tokens"), "block_tokens", low=1e-6, high=MAX_COUNT)
    recipe = Recipe(num_tokens=num_tokens, block_tokens=block_tokens, blocks=tuple(blocks))
    if recipe.edge(len(blocks) - 1) == num_tokens:
        raise FieldError(
            f"blocks has {len(blocks)} keys, but fewer blocks of {block_tokens:g} hold all "
            f"{num_tokens} tokens"
        )
    return recipe


def _read_ids(found: object) -> tuple[int, ...]:
    if not isinstance(found, list) or not found:
        raise FieldError(f"token_ids is {shorten(found)}, but must be a list of at least one id")
    return tuple(whole(id, "an id in token_ids") for id in found)


def _read_sampling(found: object) -> dict[str, bool | int | float]:
    if not isinstance(found, dict):
        raise FieldError(f"sampling is {shorten(found)}, but must be an object")
    check_names(found, SAMPLING.keys(), prefix="sampling.")
    return {name: _read_setting(name, value) for name, value in found.items()}


def _read_setting(name: str, value: object) -> bool | int | float:
    kind, low, high = SAMPLING[name]
    match kind:
        case "number":
            return number(value, f"sampling.{name}", low=low, high=high)
        case "whole":
            return whole(value, f"sampling.{name}", low=int(low), high=int(high))
        case "flag":
            if not isinstance(value, bool):
                raise FieldError(f"sampling.{name} is {shorten(value)}, but must be true or false")
            return value


def _read_limits(found: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(found, dict):
        raise FieldError(f"limits is {shorten(found)}, but must be an object of classes")
    for prompt_class, words in found.items():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise FieldError(
                f'limits.{prompt_class} is {shorten(words)}, but must be a list as ["ttft=0.5"]'
            )
    try:
        read_limits((), found)
    except ConfigError as error:
        raise FieldError(f"limits: {error}") from error
    return {prompt_class: tuple(words) for prompt_class, words in found.items()}
