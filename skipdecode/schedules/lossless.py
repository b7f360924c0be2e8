"""Lossless decoding: full depth, for which another schedule drafts tokens that full depth verifies.

To whatever decodes, prices or allocates, it is full depth, whose keys and values it keeps; rows with equal values share
batches. The loop is `skipdecode.speculative.speculative_batch`; `skipdecode.speculative.controller` decides how many
tokens to draft. No torch.
"""

from dataclasses import dataclass
from typing import Any, cast

from skipdecode.config.model import DecoderConfig
from skipdecode.schedules.schedule import FullDepth, Schedule

KEYS = ("lossless", "draft_tokens")
"""The keys of a `decode:` mapping that are not its schedule's."""
MOST_DRAFTS = 256
"""The largest `draft_tokens`: every number up to it is priced in a decision."""


@dataclass(frozen=True)
class Lossless(FullDepth):
    """Full depth, for which `drafts` may draft."""

    drafts: Schedule
    draft_tokens: int | None = None
    """Tokens to draft per round; None: as many as pay."""
    adaptive: bool = False
    """True if nothing is drafted where drafts do not pay; else one token at least is drafted in every round."""

    @property
    def drafts_by_skipping(self) -> bool:
        """True if the schedule skips any layer; else drafts come from n-gram matches alone."""
        return self.drafts != FullDepth(self.num_layers)


def lossless_schedule(drafts: Schedule, lossless: Any, draft_tokens: Any) -> Schedule:
    """The schedule of a mapping: `drafts` itself, or `Lossless` with these drafts; ValueError names the key at
    fault."""
    if not (lossless is None or isinstance(lossless, bool) or lossless == "auto"):
        raise ValueError(f"decode.lossless: {lossless!r} is not one of false, true, auto")
    is_number = (
        isinstance(draft_tokens, int) and not isinstance(draft_tokens, bool) and 1 <= draft_tokens <= MOST_DRAFTS
    )
    if draft_tokens not in (None, "auto") and not is_number:
        raise ValueError(
            f"decode.draft_tokens: expected a whole number from 1 to {MOST_DRAFTS}, or auto, got {draft_tokens!r}"
        )
    if not lossless:
        if is_number:
            raise ValueError("decode.draft_tokens: has no meaning without decode.lossless; set it to true or auto")
        return drafts
    return Lossless(drafts.num_layers, drafts, draft_tokens if is_number else None, lossless == "auto")


@dataclass(frozen=True)
class StoredDrafts:
    """What `jobs.calibrate` found for a checkpoint, stored as `drafts` in its `config.json`."""

    decode: dict[str, Any]
    """The schedule that drafts, as a `decode:` mapping; method full if only n-gram matches pay."""
    acceptance: tuple[float, ...]
    """By position in a draft, the share that full depth makes too, of those after accepted ones."""


def stored_drafts(config: DecoderConfig) -> StoredDrafts | None:
    """The drafts that the checkpoint carries, if any. ValueError for what the calibration does not write."""
    if config.drafts is None:
        return None
    decode, acceptance = (config.drafts.get(key) for key in ("decode", "acceptance"))
    remedy = "run jobs.calibrate target=drafts again, or take drafts out of config.json"
    has_method = isinstance(decode, dict) and isinstance(decode.get("method"), str)
    has_shares = isinstance(acceptance, list) and all(map(_is_share, acceptance))
    if not (has_method and has_shares):
        raise ValueError(
            f"decode.lossless: drafts in the checkpoint's config.json is not what jobs.calibrate writes; {remedy}"
        )
    if (layers := config.drafts.get("num_layers")) != config.num_hidden_layers:
        raise ValueError(
            f"decode.lossless: drafts in the checkpoint's config.json are for {layers} layers, and this model has "
            f"{config.num_hidden_layers}; {remedy}"
        )
    return StoredDrafts(cast(dict[str, Any], decode), tuple(cast(list[float], acceptance)))


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1
