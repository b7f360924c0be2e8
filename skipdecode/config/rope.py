"""The rotary positions of a config.json. No torch: they are applied in `skipdecode.backends.rope`."""

from dataclasses import dataclass
from typing import Any

ORIGINAL = "original_max_position_embeddings"
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
    "longrope": ("factor", "short_factor", "long_factor", ORIGINAL),
}
"""The keys of each kind of scaling. `dynamic` has no effect within max_position_embeddings, which no row exceeds."""
OPTIONAL_KEYS: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor",),
}


@dataclass(frozen=True)
class Rope:
    """Parameters of a rotary position embedding."""

    theta: float = 10_000.0
    scaling: str = "default"
    """A key of ROPE_KEYS."""
    share: float = 1.0
    """The share of a head's dimensions, the first ones, that are rotated (`partial_rotary_factor`)."""
    parameters: tuple[tuple[str, Any], ...] = ()
    """The keys of the scaling and their values, lists as tuples."""

    def get(self, key: str) -> Any:
        return dict(self.parameters).get(key)


def read_rope(raw: dict[str, Any], context: int) -> Rope:
    """Reads `rope_theta` and `rope_scaling` (with `type` or `rope_type`), or `rope_parameters`, which has all of it.

    `context`: the maximal number of positions. ValueError names the key at fault, or an unsupported scaling.
    """
    found = [_read_rope(raw, key, context) for key in ("rope_parameters", "rope_scaling") if raw.get(key)]
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(f"rope_scaling is {raw['rope_scaling']!r}, which is not what rope_parameters says: keep one")
    return found[0] if found else _read_rope(raw, "rope_scaling", context)


def _read_rope(raw: dict[str, Any], key: str, context: int) -> Rope:
    given = raw.get(key) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{key} is {given!r}, expected a mapping")
    for name, value in given.items():
        if isinstance(value, dict):  # kinds of layers with rotary embeddings of their own
            raise ValueError(f"{key}.{name} is {value!r}: layers with different rotary embeddings are not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KEYS:
        raise ValueError(f"{key}.rope_type is {kind!r}; supported are {', '.join(ROPE_KEYS)}")
    outer = raw.get("partial_rotary_factor")
    share = given.get("partial_rotary_factor", 1.0 if outer is None else outer)
    theta = given.get("rope_theta", raw.get("rope_theta", 10_000.0))
    values = {name: given.get(name) for name in ROPE_KEYS[kind]}
    if ORIGINAL in values:  # as in transformers, the top level comes first
        values[ORIGINAL] = raw.get(ORIGINAL, given.get(ORIGINAL, context))
    for name, value in {"theta": theta, "share": share, **values}.items():
        if name in ("short_factor", "long_factor"):
            values[name] = _numbers(f"{key}.{name}", value)
        elif name != "factor" or value is not None or kind not in ("yarn", "longrope"):
            _check_positive(f"{key}.{name}", value)
    if values.get("factor", 0) is None:  # as in transformers
        values["factor"] = context / (values[ORIGINAL] or context)
    for name in OPTIONAL_KEYS.get(kind, ()):
        if (value := given.get(name)) is not None:
            if name != "truncate":
                _check_positive(f"{key}.{name}", value)
            values[name] = value
    return Rope(theta, kind, share, tuple(values.items()))


def _check_positive(key: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{key} is {value!r}, expected a positive number")


def _numbers(key: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{key} is {values!r}, expected a list of positive numbers")
    for value in values:
        _check_positive(key, value)
    return tuple(values)


def write_rope(rope: Rope) -> dict[str, Any]:
    """The keys of config.json, which `transformers` 4 and 5 read alike."""
    raw: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.scaling != "default":
        values = {name: list(v) if isinstance(v, tuple) else v for name, v in rope.parameters}
        raw["rope_scaling"] = {"rope_type": rope.scaling, **values}
    if rope.share != 1.0:
        raw["partial_rotary_factor"] = rope.share
    return raw
