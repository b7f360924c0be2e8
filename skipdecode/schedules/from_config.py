"""Makes a schedule from a `decode:` mapping: presets, defaults, and errors that name the key. No torch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from skipdecode.config.model import DecoderConfig
from skipdecode.schedules.ffn_skip import FFNSkip, SkipBand, SkipSaturated
from skipdecode.schedules.lossless import KEYS as LOSSLESS_KEYS
from skipdecode.schedules.lossless import Lossless, lossless_schedule, stored_drafts
from skipdecode.schedules.schedule import (
    ChosenLayers,
    EarlyExit,
    FullDepth,
    Schedule,
    SkipDecode,
    SwiftKVPrefill,
    Unified,
)

# Paper Table 2: target speedup -> (max_layers, min_layers) with one warm-up layer.
PRESETS = {
    24: {2: (16, 8), 3: (10, 6), 4: (7, 5), 5: (6, 4)},
    32: {2: (22, 11), 3: (14, 8), 4: (10, 6), 5: (8, 5)},
}


Check = Callable[[str, Any], Any]
"""Takes the dotted name of a key and its value; returns the value, or raises ValueError."""


def preset(num_layers: int, speedup: float, warmup_layers: int = 1) -> tuple[int, int]:
    """The paper's (max_layers, min_layers) for a target speedup of 2 to 5; other depths scale the 24-layer pair."""
    table = PRESETS.get(num_layers, PRESETS[24])
    if speedup not in table:
        raise ValueError(
            f"decode.speedup: {speedup!r} has no preset (1, 2, 3, 4, 5 have); "
            "give decode.max_layers and decode.min_layers"
        )
    big_m, m = table[int(speedup)]
    if num_layers not in PRESETS:
        # round_half_up(x * L / 24) in integers
        big_m, m = ((2 * x * num_layers + 24) // 48 for x in (big_m, m))
        m = min(max(m, warmup_layers), num_layers)
        big_m = min(max(big_m, m), num_layers)
    return big_m, m


def make_schedule(
    decode: dict[str, Any], *, num_layers: int, max_new_tokens: int, swiftkv_from: int | None = None
) -> Schedule:
    """The schedule that a `decode:` mapping asks for; ValueError names the key at fault.

    Keys: method, those that METHODS lists for it, ffn_skip (a mapping again), lossless, draft_tokens; None counts as
    absent. `swiftkv_from`: where prompts stop if they are fed with SwiftKV.
    """
    given = {key: value for key, value in decode.items() if value is not None}
    skip, (lossless, draft_tokens) = given.pop("ffn_skip", None), (given.pop(key, None) for key in LOSSLESS_KEYS)
    base = _layer_schedule(given, num_layers, max_new_tokens)
    if swiftkv_from is not None and swiftkv_from < num_layers:
        base = SwiftKVPrefill(base, swiftkv_from)
    drafts = base if skip is None else _with_ffn_skip(base, skip)
    schedule = lossless_schedule(drafts, lossless, draft_tokens)
    if schedule is not drafts:
        _check_drafts(drafts)
    return schedule


def _check_drafts(drafts: Schedule) -> None:
    """ValueError for a schedule that cannot draft for full depth."""
    if not drafts.is_static:
        raise ValueError(
            "decode.ffn_skip.mode: with decode.lossless rows are at different steps, and cannot decide on blocks "
            "themselves; use modes calibrated or fixed, or decode.lossless=false"
        )
    if drafts.prefill().swiftkv_from is not None:
        raise ValueError(
            "decode.lossless: full depth has no SwiftKV prompt; use prefill.method=full, or decode.lossless=false"
        )


def known_acceptance(config: DecoderConfig, schedule: Lossless) -> Sequence[float]:
    """What calibration measured for the drafts of `schedule`, by position in a draft; empty if it measured others."""
    stored = stored_drafts(config)
    if stored is None or schedule.drafts != make_schedule(
        stored.decode, num_layers=schedule.num_layers, max_new_tokens=1
    ):
        return ()
    return stored.acceptance


def listed_schedule(config: DecoderConfig, entry: dict[str, Any], max_new_tokens: int) -> Schedule:
    """The schedule of an entry in a list of schedules: a `decode:` mapping that may also have `prefill` (full or
    swiftkv). ValueError names the key at fault."""
    decode = dict(entry)
    prefill = decode.pop("prefill", None) or "full"
    if decode.get("lossless"):
        raise ValueError("decode.lossless: has no meaning in a list of schedules, each of which is to be decoded by")
    if prefill not in ("full", "swiftkv"):
        raise ValueError(f"decode.prefill: {prefill!r} is not one of full, swiftkv")
    if prefill == "swiftkv" and config.swiftkv is None:
        raise ValueError(
            "decode.prefill: swiftkv needs a model with SwiftKV's weights, and this one has none; they are given by "
            "model.swiftkv in a training, by swiftkv in a benchmark, and by jobs.distill to a checkpoint"
        )
    check_whole_layers(config, decode)
    layers, swiftkv_from = config.num_hidden_layers, config.swiftkv_layer(prefill)
    return make_schedule(decode, num_layers=layers, max_new_tokens=max_new_tokens, swiftkv_from=swiftkv_from)


def check_whole_layers(config: DecoderConfig, decode: Mapping[str, Any]) -> None:
    """ValueError if `decode` skips parts of layers and the model's layers run whole or not at all."""
    if decode.get("ffn_skip") and (why := config.why_whole_layers) is not None:
        raise ValueError(f"decode.ffn_skip: {why}; leave it out")


def _layer_schedule(given: dict[str, Any], num_layers: int, max_new_tokens: int) -> Schedule:
    name = given.pop("method", "skipdecode")
    if name not in METHODS:
        raise ValueError(f"decode.method: {name!r} is not one of {', '.join(METHODS)}")
    method = METHODS[name]
    for key in given:
        if key not in method.keys and not (name == "full" and key == "speedup" and given[key] == 1):
            raise ValueError(f"decode.{key}: has no meaning with method {name!r}; {_remedy(key, tuple(method.keys))}")
    checked = {}
    for key, value in given.items():
        check: Check = method.keys.get(key, _number)
        checked[key] = check(f"decode.{key}", value)
    return method.make(checked, num_layers, max_new_tokens)


def _remedy(key: str, allowed: Sequence[str]) -> str:
    """Names a method that has the key, or else the keys that the given method has."""
    methods = [name for name, method in METHODS.items() if key in method.keys]
    if methods:
        return f"give decode.method={methods[0]} for it, or leave it out"
    return f"it takes: {', '.join(allowed) or 'nothing'}"


def _full(given: dict[str, Any], num_layers: int, max_new_tokens: int) -> Schedule:
    return FullDepth(num_layers)


def _unified(given: dict[str, Any], num_layers: int, max_new_tokens: int) -> Schedule:
    if "layers" not in given:
        raise ValueError("decode.layers: method 'unified' needs the number of layers to run")
    return Unified(num_layers, given["layers"])


def _chosen(given: dict[str, Any], num_layers: int, max_new_tokens: int) -> Schedule:
    if "layers" not in given:
        raise ValueError("decode.layers: method 'layers' needs the list of the layers to run")
    return ChosenLayers(num_layers, given["layers"])


def _number(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{key}: expected a number, got {value!r}")
    return value


def _whole(key: str, value: Any) -> int:
    if not _is_whole(value):
        raise ValueError(f"{key}: expected a whole number, got {value!r}")
    return int(value)


def _layer_count(key: str, value: Any) -> int:
    if isinstance(value, list | tuple):
        raise ValueError(f"{key}: expected a whole number, got {value!r}; give decode.method=layers for a list")
    return _whole(key, value)


def _layer_numbers(key: str, value: Any) -> tuple[int, ...]:
    """Ascending and distinct; ValueError if `value` is not a list of whole numbers."""
    if not isinstance(value, list | tuple) or not all(map(_is_whole, value)):
        raise ValueError(f"{key}: expected a list of layer numbers, got {value!r}")
    return tuple(sorted(set(value)))


def _decreasing(cls: type[SkipDecode], given: dict[str, Any], num_layers: int, max_new_tokens: int) -> Schedule:
    bounds = [key for key in ("max_layers", "min_layers") if key in given]
    if "speedup" in given and bounds:
        raise ValueError(
            f"decode.speedup: give either speedup or max_layers and min_layers, not both (got {bounds[0]} too); "
            "set decode.speedup=null where a configuration file gives it"
        )
    if len(bounds) == 1:
        missing = "min_layers" if bounds[0] == "max_layers" else "max_layers"
        raise ValueError(f"decode.{missing}: needed beside {bounds[0]}")
    warmup = given.get("warmup_layers", 1)
    if bounds:
        big_m, m = given["max_layers"], given["min_layers"]
    else:
        speedup = given.get("speedup", 2)
        if speedup == 1:
            return FullDepth(num_layers)
        big_m, m = preset(num_layers, speedup, warmup)
    horizon = given.get("horizon", max(max_new_tokens - 1, 1))
    return cls(num_layers, big_m, m, warmup, horizon)


class Method(NamedTuple):
    """A value of `decode.method`."""

    keys: Mapping[str, Check]
    """The keys of the `decode:` mapping that belong to it, each with the check of its value."""
    make: Callable[[dict[str, Any], int, int], Schedule]
    """Makes the schedule from the given keys, the number of layers and max_new_tokens."""
    is_nested: bool = True
    """True if a deeper plan includes the layers of a shallower one, so that training covers a plan that includes the
    trained layers; otherwise training covers a plan with at least as many layers."""


_DECREASING_KEYS: dict[str, Check] = {"speedup": _number, "max_layers": _whole, "min_layers": _whole, "horizon": _whole}
METHODS: dict[str, Method] = {
    "full": Method({}, _full),
    "skipdecode": Method({**_DECREASING_KEYS, "warmup_layers": _whole}, partial(_decreasing, SkipDecode)),
    "early_exit": Method(_DECREASING_KEYS, partial(_decreasing, EarlyExit)),
    "unified": Method({"layers": _layer_count}, _unified, is_nested=False),
    "layers": Method({"layers": _layer_numbers}, _chosen),
}
"""Every schedule that `decode.method` may name; a new one is added here."""


class FFNSkipMode(NamedTuple):
    """A value of `decode.ffn_skip.mode`."""

    schedule: type[FFNSkip]
    required: tuple[str, ...]
    defaults: dict[str, Any]


# With 25 warm-up tokens the paper's quality levels off (Fig. 5). It gives neither threshold nor borders: these are a
# starting point, and `jobs.calibrate` proposes better ones.
FFN_SKIP_MODES = {
    "row": FFNSkipMode(SkipSaturated, (), {"cold_start": 4, "cold_end": 4, "warmup_tokens": 25, "threshold": 0.98}),
    "calibrated": FFNSkipMode(SkipBand, ("layers",), {"warmup_tokens": 25}),
    "fixed": FFNSkipMode(SkipBand, ("layers",), {"warmup_tokens": 25}),
}


def complete_ffn_skip(skip: Any) -> dict[str, Any]:
    """The `ffn_skip:` mapping with its mode and every default filled in; ValueError names a key at fault."""
    if not isinstance(skip, dict):
        raise ValueError(f"decode.ffn_skip: expected a mapping with mode and its keys, got {skip!r}")
    given = {key: value for key, value in skip.items() if value is not None}
    mode = given.pop("mode", "row")
    if mode not in FFN_SKIP_MODES:
        raise ValueError(f"decode.ffn_skip.mode: {mode!r} is not one of {', '.join(FFN_SKIP_MODES)}")
    _, required, defaults = FFN_SKIP_MODES[mode]
    for key in given:
        if key not in required and key not in defaults:
            raise ValueError(
                f"decode.ffn_skip.{key}: has no meaning with mode {mode!r}; it takes: "
                f"{', '.join((*required, *defaults))}"
            )
    for key in required:
        if key not in given:
            hint = "; jobs.calibrate writes a checkpoint that carries it" if mode == "calibrated" else ""
            raise ValueError(f"decode.ffn_skip.{key}: mode {mode!r} needs it{hint}")
    return {"mode": mode} | defaults | given


def _with_ffn_skip(base: Schedule, skip: Any) -> Schedule:
    given = complete_ffn_skip(skip)
    mode = given.pop("mode")
    for key in given.keys() - {"layers"}:
        check = _number if key == "threshold" else _whole
        check(f"decode.ffn_skip.{key}", given[key])
    if "layers" in given:
        given["layers"] = _layer_numbers("decode.ffn_skip.layers", given["layers"])
    return FFN_SKIP_MODES[mode].schedule(base=base, **given)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
