"""What a Hugging Face config.json says of each layer: its window, its RoPE, its experts."""

from jaxserve.checkpoint.hf_families import HfFamily
from jaxserve.checkpoint.hf_rope import FULL, SLIDING, read_ropes
from jaxserve.checkpoint.hf_settings import HfSettings
from jaxserve.errors import CheckpointError
from jaxserve.model.config import ExpertsConfig, LayerConfig


def read_layers(
    settings: HfSettings,
    family: HfFamily,
    num_layers: int,
    *,
    head_dim: int,
    experts: ExpertsConfig | None,
) -> tuple[LayerConfig, ...]:
    """Returns what config.json says of each layer.

    Raises:
      CheckpointError: a setting is of the wrong type, or not supported for the family.
    """
    window = settings.optional_integer("sliding_window")
    if family.window == "none" or (
        family.window_switch and not settings.flag("use_sliding_window")
    ):
        window = None
    has_rope = _read_rope_layers(settings, family, num_layers)
    kinds = _read_layer_kinds(settings, family, window=window, has_rope=has_rope)
    has_experts = _read_expert_layers(settings, family, num_layers, experts)
    ropes = read_ropes(settings, family, head_dim=head_dim)
    return tuple(
        LayerConfig(
            rope=ropes[kind] if has_rope[i] else None,
            window=window if kind == SLIDING else None,
            mlp="experts" if has_experts[i] else "dense",
        )
        for i, kind in enumerate(kinds)
    )


def _read_layer_kinds(
    settings: HfSettings, family: HfFamily, *, window: int | None, has_rope: list[bool]
) -> list[str]:
    """Returns `FULL` or `SLIDING` for each layer: what is listed, or else the family's pattern."""
    num_layers = len(has_rope)
    match family.window:
        case "none":
            slides = [False] * num_layers
        case "all":
            slides = [window is not None] * num_layers
        case "from_layer":
            first = settings.integer("max_window_layers")
            slides = [window is not None and i >= first for i in range(num_layers)]
        case "periodic":
            period = settings.integer("sliding_window_pattern")
            if period < 1:
                raise settings.wrong("sliding_window_pattern", period, "at least 1")
            slides = [(i + 1) % period != 0 for i in range(num_layers)]
        case "without_rope":
            slides = [window is not None and not rope for rope in has_rope]
    kinds = [SLIDING if slide else FULL for slide in slides]
    listed = settings.texts("layer_types")
    if listed is None:
        listed = kinds
    if len(listed) != num_layers:
        raise CheckpointError(
            f"{settings.where}: layer_types lists {len(listed)} layers of {num_layers}"
        )
    is_free = family.window not in ("none", "all")
    if set(listed) - {FULL, SLIDING} or (listed != kinds and not is_free):
        supported = f"{FULL} and {SLIDING}" if is_free else f"{kinds[0]} in every layer"
        raise CheckpointError(
            f"{settings.where}: layer_types has {', '.join(sorted(set(listed)))!r:.200}; "
            f"supported for {family.name} is {supported}"
        )
    if SLIDING in listed and window is None:
        raise CheckpointError(
            f"{settings.where}: layer_types has {SLIDING}, but there is no sliding_window in use"
        )
    return listed


def _read_rope_layers(settings: HfSettings, family: HfFamily, num_layers: int) -> list[bool]:
    if family.window != "without_rope":
        return [True] * num_layers
    listed = settings.integers("no_rope_layers")
    if listed is None:
        interval = settings.integer("no_rope_layer_interval")
        if interval < 1:
            raise settings.wrong("no_rope_layer_interval", interval, "at least 1")
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if len(listed) < num_layers:
        raise CheckpointError(
            f"{settings.where}: no_rope_layers lists {len(listed)} layers of {num_layers}"
        )
    return [bool(entry) for entry in listed[:num_layers]]  # 1 says that the layer has RoPE


def _read_expert_layers(
    settings: HfSettings, family: HfFamily, num_layers: int, experts: ExpertsConfig | None
) -> list[bool]:
    if experts is None or "decoder_sparse_step" not in family.defaults:
        return [experts is not None] * num_layers
    step, dense = settings.integer("decoder_sparse_step"), settings.integers("mlp_only_layers")
    if step < 1:
        raise settings.wrong("decoder_sparse_step", step, "at least 1")
    return [(i + 1) % step == 0 and i not in (dense or []) for i in range(num_layers)]
