"""What a checkpoint says of the schedules that it was tuned for. No torch.

How good text is, tuned or not, is for `jobs.evaluate`: here is only read what training wrote down.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skipdecode.config import DecoderConfig
from skipdecode.config_json import check_mapping, check_mappings
from skipdecode.schedule import make_schedule

SCHEDULE_FILE, TRAINED_FILE = "skip_decode.json", "trained_schedules.json"
"""Beside the weights of an adapter: the schedule that generation takes by default, and all that training ran."""
LATE_STEP = 1 << 20  # beyond any horizon, where a schedule that falls runs its fewest layers


def read_schedules(folder: Path, key: str) -> tuple[dict[str, Any] | None, list[dict[str, Any]] | None]:
    """What SCHEDULE_FILE and TRAINED_FILE of an adapter say, None without one. ValueError blames `key`."""
    try:
        schedule, trained = _read_json(folder / SCHEDULE_FILE), _read_json(folder / TRAINED_FILE)
        check_mapping(str(folder / SCHEDULE_FILE), schedule)
        check_mappings(str(folder / TRAINED_FILE), trained)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    return schedule, trained


def why_untuned(config: DecoderConfig, decode: Mapping[str, Any]) -> str | None:
    """What is said of a checkpoint that skips by `decode` untuned, behind its name; None: it was tuned for that.

    Without a list of what was trained the method decides, with it the fewest layers of a token, too. ValueError blames
    `model.source` for a list that is none for this model.
    """
    method, carried = _method(decode), config.skip_decode
    if carried is None:
        return f"carries no skip_decode schedule, so nothing says that it was tuned for decode.method={method}"
    known = [carried, *(config.trained_schedules or ())]
    methods = {_method(one) for one in known}
    if method not in methods:
        skipping = sorted(methods - {"full"}) or ["full"]
        which = "the schedule of method" if len(skipping) == 1 else "schedules of methods"
        return f"carries {which} {', '.join(skipping)}, so nothing says that it was tuned for decode.method={method}"
    if config.trained_schedules is None:
        return None
    try:
        trained = min(_fewest_layers(one, config) for one in known if _method(one) == method)
    except ValueError as error:
        raise ValueError(
            f"model.source: the trained_schedules that it carries: {error}; repair them, or take them out"
        ) from error
    asked = _fewest_layers(decode, config)
    if asked >= trained:
        return None
    return (
        f"was tuned for decode.method={method} with {trained} layers or more, and this schedule runs as few as {asked}"
    )


def _fewest_layers(decode: Mapping[str, Any], config: DecoderConfig) -> int:
    """That a schedule gives any token, however long its text is."""
    plain = {key: value for key, value in decode.items() if key != "prefill"}
    schedule = make_schedule(plain, num_layers=config.num_hidden_layers, max_new_tokens=2)
    return schedule.step(LATE_STEP).num_layers_run


def _method(decode: Mapping[str, Any]) -> str:
    return str(decode.get("method") or "skipdecode")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
