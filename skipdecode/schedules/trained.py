"""The schedules that a checkpoint was tuned for, as its training recorded them. No torch.

This says nothing about quality, which `jobs.evaluate` measures.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skipdecode.config.json_files import check_mapping, check_mappings, read_json
from skipdecode.config.model import DecoderConfig
from skipdecode.schedules.from_config import METHODS, make_schedule
from skipdecode.schedules.layer_plan import LayerPlan

SCHEDULE_FILE, TRAINED_FILE = "skip_decode.json", "trained_schedules.json"
"""Files of an adapter: the schedule that generation uses by default, and all schedules of its last training."""


def read_schedules(folder: Path, key: str) -> tuple[dict[str, Any] | None, list[dict[str, Any]] | None]:
    """The contents of SCHEDULE_FILE and TRAINED_FILE of an adapter, None for a missing file. ValueError names `key`."""
    try:
        schedule, trained = (
            read_json(path) if (path := folder / name).is_file() else None for name in (SCHEDULE_FILE, TRAINED_FILE)
        )
        check_mapping(str(folder / SCHEDULE_FILE), schedule)
        check_mappings(str(folder / TRAINED_FILE), trained)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    return schedule, trained


def why_untuned(config: DecoderConfig, method: str, asked: LayerPlan) -> str | None:
    """Why a checkpoint was not tuned for a schedule, as the rest of a sentence that begins with its name; None if it
    was, or if nothing is skipped.

    `asked`: the plan of the last token under a schedule of that `method`. It must include the layers that the last
    token ran in training, or as many where layer sets are not nested (`Method.is_nested`). Without a list of trained
    schedules, only the method counts. Entries that this model cannot run are ignored.
    """
    known, is_listed = config.trained_schedules, config.trained_schedules is not None
    if known is None and config.skip_decode is not None:
        known = [config.skip_decode]
    if asked.num_layers_run == config.num_hidden_layers:
        return None
    if known is None:
        return f"carries no skip_decode schedule, so nothing says that it was tuned for decode.method={method}"
    methods = {_method(one) for one in known}
    if method not in methods:
        skipping = sorted(methods - {"full"}) or ["full"]
        which = "the schedule of method" if len(skipping) == 1 else "schedules of methods"
        return f"carries {which} {', '.join(skipping)}, so nothing says that it was tuned for decode.method={method}"
    if not is_listed:
        return None
    trained = [plan for one in known if _method(one) == method and (plan := _last_plan(one, config)) is not None]
    if any(_includes(asked, plan, method) for plan in trained):
        return None
    fewest = min((plan.num_layers_run for plan in trained), default=config.num_hidden_layers)
    what = f"with {fewest} layers or more" if asked.num_layers_run < fewest else "with other layers"
    down = f"{asked.num_layers_run} of {config.num_hidden_layers} layers"
    return f"was tuned for decode.method={method} {what}, and this schedule comes down to {down}"


def _includes(asked: LayerPlan, trained: LayerPlan, method: str) -> bool:
    """True if training under the plan `trained` covers the plan `asked` (`Method.is_nested`)."""
    if METHODS[method].is_nested:
        return set(asked.layers) >= set(trained.layers)
    return asked.num_layers_run >= trained.num_layers_run


def _last_plan(decode: Mapping[str, Any], config: DecoderConfig) -> LayerPlan | None:
    """The plan of the last token at the horizon; None if this model cannot run the schedule."""
    plain = {key: value for key, value in decode.items() if key != "prefill"}
    try:
        schedule = make_schedule(plain, num_layers=config.num_hidden_layers, max_new_tokens=2)
        return schedule.step(plain.get("horizon") or 1)
    except (ValueError, TypeError):  # the file may hold anything
        return None


def _method(decode: Mapping[str, Any]) -> str:
    return str(decode.get("method") or "skipdecode")
