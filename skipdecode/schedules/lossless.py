"""Lossless: a schedule that only drafts. Full depth verifies the drafts, and the tokens are those of full depth.

A value like every schedule, so rows with equal ones share batches, and what prices caches sees full depth, whose keys
and values it keeps. The loop is `skipdecode.speculative.speculative_batch`; `skipdecode.speculative.draft_length`
says how many tokens to draft. No
torch.
"""

from dataclasses import dataclass
from typing import Any, cast

from skipdecode.config.model import DecoderConfig
from skipdecode.schedules.plan import FullDepth, Schedule

KEYS = ("lossless", "draft_tokens")
"""Of a `decode:` mapping, beside those of its schedule."""
MOST_DRAFTS = 256
"""Of `draft_tokens`: a decision prices every number up to it, which takes 6 ms then."""


@dataclass(frozen=True)
class Lossless(FullDepth):
    """Full depth, for which `drafts` may draft."""

    drafts: Schedule
    draft_tokens: int | None = None
    """At a time; None: as many as pay."""
    adaptive: bool = False
    """Drafts nothing where nothing is gained by it; else one token at least."""

    @property
    def drafts_by_skipping(self) -> bool:
        """Whether the schedule leaves anything out; else rows draft what they repeat, and nothing else."""
        return self.drafts != FullDepth(self.num_layers)


def lossless_schedule(drafts: Schedule, lossless: Any, draft_tokens: Any) -> Schedule:
    """`drafts` itself where it is to be decoded by, else `Lossless` for it; ValueError names the key at fault."""
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
    """What `jobs.calibrate` found for a checkpoint, which carries it as `drafts` in its `config.json`."""

    decode: dict[str, Any]
    """The schedule that drafts, as a `decode:` mapping; method full where nothing pays but repeats."""
    acceptance: tuple[float, ...]
    """By place in a draft: the share of drafts that full depth makes too, where all before them were."""


def stored_drafts(config: DecoderConfig) -> StoredDrafts | None:
    """None: the checkpoint carries none. ValueError for what the calibration does not write."""
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
