"""The schedules of a training, and the one that its checkpoint will carry. Every error is a `ConfigError`."""

from typing import TypeAlias

from pipeline.config.job import ConfigError
from pipeline.formatting import Json
from pipeline.training.config import TrainSection
from skipdecode.config.model import DecoderConfig
from skipdecode.schedules.from_config import METHODS, listed_schedule

Decode: TypeAlias = dict[str, Json]
"""A `decode:` mapping."""


def check_schedules(train: TrainSection, model_config: DecoderConfig) -> tuple[Decode, list[Decode]]:
    """The schedule that the checkpoint will carry, and all that are trained, as it will say; ConfigError for one that
    this model cannot run."""
    found: list[Decode] = []
    for index, decode in enumerate(train.schedules):
        key, is_swiftkv = f"train.schedules[{index}]", decode.get("prefill") == "swiftkv"
        _check_schedule(key, decode, train.horizon, model_config)
        defaults: Decode = {"method": "skipdecode", "prefill": "full"}
        found.append(defaults | {name: value for name, value in decode.items() if value is not None})
        if found[-1] in found[:-1]:  # of a shallow model two different ones may come to the same layers
            raise ConfigError(key, f"{decode} is there twice")
        if train.trainable == "swiftkv" and not is_swiftkv:
            raise ConfigError(key, "without prefill: swiftkv it runs nothing that train.trainable=swiftkv trains")
    if model_config.swiftkv is not None and not any(decode.get("prefill") == "swiftkv" for decode in train.schedules):
        raise ConfigError("train.schedules", "none has prefill: swiftkv, which model.swiftkv is for")
    default = _default_of(train)
    if "prefill" in default:
        raise ConfigError(
            "train.default_schedule.prefill",
            "a checkpoint carries no prefill method; set prefill.method in jobs.generate",
        )
    _check_schedule("train.default_schedule", default, train.horizon, model_config)
    return _carried(default, train.horizon), [_carried(decode, train.horizon) for decode in train.schedules]


def _carried(decode: Decode, horizon: int) -> Decode:
    """The mapping with its method, and with the horizon that it is trained for."""
    carried: Decode = {"method": "skipdecode"}
    carried |= {key: value for key, value in decode.items() if value is not None}
    if "horizon" in METHODS[str(carried["method"])].keys:
        carried["horizon"] = carried.get("horizon", horizon)
    return carried


def _default_of(train: TrainSection) -> Decode:
    """`train.default_schedule`, or what stands in for it."""
    if train.default_schedule is not None:
        return train.default_schedule
    whole = [given for given in train.schedules if given.get("prefill") != "swiftkv"] or train.schedules
    plain: list[Decode] = [{key: value for key, value in given.items() if key != "prefill"} for given in whole]
    skipping = [decode for decode in plain if decode.get("method", "skipdecode") != "full"]
    wanted: Decode = {"method": "skipdecode", "speedup": 2}
    return wanted if wanted in skipping else skipping[0] if skipping else {"method": "full"}


def _check_schedule(key: str, decode: Decode, horizon: int, model_config: DecoderConfig) -> None:
    if decode.get("ffn_skip") is not None:
        raise ConfigError(
            f"{key}.ffn_skip", "FFN-SkipLLM needs no training; give it to jobs.calibrate and jobs.generate"
        )
    try:
        listed_schedule(model_config, decode, horizon + 1)
    except ValueError as error:
        found = ConfigError.parse(error).renamed("decode", key)
        raise ConfigError(found.key, found.message.replace("decode.", f"{key}.")) from error  # remedies name keys too
