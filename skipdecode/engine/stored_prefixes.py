"""Prefixes that rows of a continuous batch share, each stored once for as long as a row reads it.

Only for back ends whose attention reads a prefix in place (`Backend.supports_shared_prefix`); elsewhere prefixes are
copied to every row (`skipdecode.engine.prefix_sharing`). Rows that join later find the prefixes of those before them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from skipdecode.engine.prefill import feed_in_place
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.kv.slot_cache import Slot, SlotCache
from skipdecode.kv.static_cache import SharedPrefixKV
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import Schedule, kv_owner_of_layers


@dataclass(eq=False)
class StoredPrefix:
    tokens: tuple[int, ...]
    slot: Slot
    parent: "StoredPrefix | None"
    """The prefix that it begins with, whose columns it has too."""
    num_users: int = 0
    """Rows that read it, and prefixes that begin with it."""

    @property
    def length(self) -> int:
        return len(self.tokens)


class StoredPrefixes:
    def __init__(self, model: Decoder, schedule: Schedule) -> None:
        self._model, self._schedule = model, schedule
        kv_owner = kv_owner_of_layers(schedule, model.config.kv_group_size)
        self.cache = SlotCache(model.config, kv_owner, [0] * len(kv_owner), dtype=model.kv_dtype, device=model.device)
        """A prefix from column 0 of its slot on, with as many columns in all layers."""
        self._by_tokens: dict[tuple[int, ...], StoredPrefix] = {}
        self.num_fed = 0
        """Tokens that were fed so far."""

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    def take(self, sharing: PrefixSharing) -> list[StoredPrefix | None]:
        """The prefix of each row of `sharing`, which is fed if it is not there yet; `release` them when the rows end.
        Nothing has changed if this raises."""
        held: list[StoredPrefix] = []
        try:
            for level in sharing.levels:
                self._feed_level(sharing, level, held)
            found = [
                None if prefix < 0 else self._by_tokens[sharing.prefixes[prefix]] for prefix in sharing.prefix_of_row
            ]
            for prefix in found:
                if prefix is not None:
                    prefix.num_users += 1
        finally:
            self.release(held)  # those that no row reads and no prefix begins with
        return found

    def release(self, prefixes: Sequence[StoredPrefix]) -> None:
        """One user less of each."""
        for prefix in prefixes:
            prefix.num_users -= 1
            if not prefix.num_users:
                del self._by_tokens[prefix.tokens]
                self.cache.release([prefix.slot])
                if prefix.parent is not None:
                    self.release([prefix.parent])

    def place(self, prefix: StoredPrefix | None) -> tuple[int, int]:
        """Offset and length for `SharedPrefix`."""
        if prefix is None:
            return 0, 0
        groups, columns = self.cache.memory_of(0)[0].shape[1:3]
        return prefix.slot.index * groups * columns, prefix.length

    def shared_by(self, prefixes: Sequence[StoredPrefix | None]) -> SharedPrefixKV:
        """The prefixes of rows whose prompts are fed."""
        k, v = self.cache.memory
        return SharedPrefixKV(k, v, self.cache.kv_owner, list(map(self.place, prefixes)))

    def _feed_level(self, sharing: PrefixSharing, level: Sequence[int], held: list[StoredPrefix]) -> None:
        """Feeds those of `level` that are missing, whose parents are there. All of them get a user more, and are added
        to `held`."""
        new: list[StoredPrefix] = []
        for number in level:
            tokens, parent = sharing.prefixes[number], sharing.parents[number]
            prefix = self._by_tokens.get(tokens)
            if prefix is None:
                (slot,) = self.cache.take([len(tokens)], [1])
                above = None if parent < 0 else self._by_tokens[sharing.prefixes[parent]]
                prefix = StoredPrefix(tokens, slot, above)
                if above is not None:
                    above.num_users += 1
                self._by_tokens[tokens] = prefix
                new.append(prefix)
            prefix.num_users += 1
            held.append(prefix)
        if not new:
            return
        num_cached = []
        for prefix in new:
            num_cached.append(0 if prefix.parent is None else prefix.parent.length)
            if prefix.parent is not None:
                self.cache.copy_slot(prefix.parent.slot, prefix.slot, prefix.parent.length)
        own = [prefix.tokens[count:] for prefix, count in zip(new, num_cached, strict=True)]
        slots = [prefix.slot for prefix in new]
        feed_in_place(self._model, own, self.cache, slots, self._schedule.prefill(), num_cached, return_argmax=True)
        self.num_fed += sum(map(len, own))
