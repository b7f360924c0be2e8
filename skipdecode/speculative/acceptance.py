"""What a schedule would draft at every position of texts that full depth wrote, in passes over all positions at once.

A draft is made token by token over the keys and values of full depth, and behind the row's newest token over those of
the draft itself (`skipdecode.speculative.speculative_batch`). A text is known, so all drafts that begin anywhere in
it can be made side
by side: pass p takes every token as number p of a draft. That equals drafting but for the order of sums, and costs a
pass of the schedule's layers per place, whatever is accepted.

B rows, P prompt columns, T response tokens, n columns of a pass, H heads of queries, G of keys and values, S columns of
full depth, K head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from skipdecode.kv.view import attention, causal_mask, diagonal
from skipdecode.model.decoder import Decoder
from skipdecode.model.ffn_executor import ALL_ROWS
from skipdecode.model.layer_loop import run_layers
from skipdecode.model.teacher_forcing import IGNORE, ForcedView, TeacherBatch, token_ranges
from skipdecode.schedules.layer_ranges import LayerRanges
from skipdecode.schedules.plan import FullDepth, Schedule
from skipdecode.speculative.draft_vocab import DraftHead

Kept = dict[int, tuple[Tensor, Tensor]]
"""K and V [B, G, columns, K] by layer."""


@dataclass(frozen=True)
class Counts:
    """Of the drafts that begin at every position, by place in a draft."""

    tried: tuple[int, ...]
    """Drafted tokens whose predecessors were all accepted, and whose place the text has a token for."""
    accepted: tuple[int, ...]
    """Those of them that full depth made too."""

    @property
    def rates(self) -> tuple[float, ...]:
        """The share accepted, up to the last place that was tried."""
        return tuple(a / t for a, t in zip(self.accepted, self.tried, strict=True) if t)

    def __add__(self, other: "Counts") -> "Counts":
        def total(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
            return tuple(x + y for x, y in zip(a, b, strict=True))

        return Counts(total(self.tried, other.tried), total(self.accepted, other.accepted))


class DraftedText:
    """The texts of a batch, as full depth has them: drafts are made over its keys and values, which are kept."""

    @torch.inference_mode()
    def __init__(self, model: Decoder, batch: TeacherBatch, listed: frozenset[int] | None = None) -> None:
        """`batch`: greedy texts of `model` at full depth. `listed`: tokens that drafts choose among; None: all."""
        self._model, self._batch = model, batch
        self._head = None if listed is None or not model.has_head_rows else DraftHead.of(listed, model)
        columns, device = batch.tokens.shape[1], batch.tokens.device
        offsets = torch.arange(columns, device=device)
        self._positions = (offsets - batch.num_pad[:, None]).clamp(min=-1)  # [B, P + T - 1]
        valid = (offsets >= batch.num_pad[:, None])[:, None, None]  # [B, 1, 1, S]
        mask = valid & causal_mask(columns, columns, device) | diagonal(columns, columns, device)
        num_layers = model.config.num_hidden_layers
        view = KeepingView(self._positions, mask, model.rotary_table, range(num_layers))
        ranges = LayerRanges.of_plan(FullDepth(num_layers).prefill())
        run_layers(model, model.embed(batch.tokens, self._positions), view, ranges)
        self._full = view.shared
        self._fed = batch.targets[:, 1:] != IGNORE  # [B, T - 1] y_k that is fed to make y_(k+1)
        self._last: tuple[Schedule, int, Tensor] | None = None  # of `hits`

    @property
    def num_tokens(self) -> int:
        """That decode steps made."""
        return int(self._fed.sum())

    def hits(self, drafts: Schedule, places: int) -> Tensor:
        """[places, B, T - 1] bool: of the draft that begins behind y_k, whether token number p (from 0 on), made behind
        k + p true ones, is y_(k+1+p). False where there is none. The last answer is kept."""
        if self._last is None or self._last[:2] != (drafts, places):
            self._last = drafts, places, self._hits(drafts, places)
        return self._last[2]

    @torch.inference_mode()
    def _hits(self, drafts: Schedule, places: int) -> Tensor:
        batch, P = self._batch, self._batch.prompt_columns
        tokens, positions = batch.tokens[:, P:], self._positions[:, P:]  # [B, T - 1]
        num_steps = tokens.shape[1]
        ranges = token_ranges(drafts.prefill(), [drafts.step(k) for k in range(num_steps)], 0, ALL_ROWS)
        found, made = [], list[Kept]()
        for place in range(min(places, num_steps)):
            made.append({})
            view = DraftView(
                positions,
                None,
                self._model.rotary_table,
                (),
                full=self._full,
                made=made,
                num_pad=batch.num_pad,
                first=P,
            )
            h, _ = run_layers(self._model, self._model.embed(tokens, positions), view, ranges)
            same = torch.zeros_like(self._fed)
            same[self._fed] = self._argmax(h[self._fed]) == batch.targets[:, 1:][self._fed]
            found.append(F.pad(same[:, place:], (0, place)))  # of the draft that began so many columns before
        none = torch.zeros_like(self._fed)
        return torch.stack([*found, *[none] * (places - len(found))])

    def _argmax(self, h: Tensor) -> Tensor:
        model = self._model
        return model.argmax(h) if self._head is None else self._head.argmax(model.head_states(h))

    def rounds(self, drafts: Schedule, most: int) -> list[int]:
        """Passes at full depth that the texts take with 1, 2, .. `most` drafts before each, or as many as a text has
        room for. At the ends of texts drafts are lost, so these are more passes than acceptance alone says."""
        lengths = self._fed.sum(dim=1).tolist()
        rows = self.hits(drafts, most).permute(1, 2, 0).tolist()  # [B, T - 1, most]
        return [
            sum(_rounds([own[:number] for own in row[:length]]) for row, length in zip(rows, lengths, strict=True))
            for number in range(1, most + 1)
        ]

    def count(self, drafts: Schedule, places: int) -> Counts:
        """How drafts of up to `places` tokens fare, one begun at every position."""
        running, tried, accepted = self._fed, list[int](), list[int]()
        for place, hits in enumerate(self.hits(drafts, places)):
            running = running & F.pad(self._fed[:, place:], (0, min(place, self._fed.shape[1])))
            tried.append(int(running.sum()))
            running = running & hits
            accepted.append(int(running.sum()))
        return Counts(tuple(tried), tuple(accepted))


def _rounds(hits: Sequence[Sequence[bool]]) -> int:
    """Of one text, by decode step: which tokens of a draft that begins there are right."""
    k, rounds = 0, 0
    while k < len(hits):
        room = min(len(hits[k]), len(hits) - 1 - k)
        k += 1 + next((place for place in range(room) if not hits[k][place]), room)
        rounds += 1
    return rounds


@dataclass
class KeepingView(ForcedView):
    """Of a pass at full depth, whose keys and values stay in `shared`."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert k is not None
        assert v is not None
        self.store(layer, k.contiguous(), v.contiguous())  # not the memory of queries with them
        return super().attend(layer, q, k, v)

    def part(self, where: slice) -> "KeepingView":
        return self  # every layer runs every column


@dataclass
class DraftView(ForcedView):
    """Of pass p, which takes every response column as number p of a draft. Column k sees full depth up to where its
    draft began, and of the passes before it the column of its draft that each of them made."""

    full: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer, [B, G, S, K]."""
    made: list[Kept] = field(default_factory=list)
    """By pass, this one last: K and V of the response columns that run a layer."""
    num_pad: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[B] int64: columns of left padding."""
    first: int = 0
    """Columns of the prompt."""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """By the number of columns that a layer runs, which most layers have in common."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert k is not None
        assert v is not None
        self.made[-1][layer] = k, v
        known = [self.full[layer], *(kv[layer] for kv in self.made)]
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*known, strict=True))  # [B, G, S + passes n, K]
        n = q.shape[2]
        if n not in self.masks:
            self.masks[n] = self._mask(n, known[0][0].shape[2])
        return attention(q, keys, values, self.masks[n])

    def _mask(self, n: int, num_full: int) -> Tensor:
        """[B, 1, n, S + passes n] bool: full depth before the draft began, and one column of each pass."""
        place, device = len(self.made) - 1, self.num_pad.device
        at, own = torch.arange(num_full, device=device), torch.arange(n, device=device)
        is_before = at < (self.first + own - place)[:, None]  # [n, S]
        drafted = torch.cat([own == (own - place + p)[:, None] for p in range(place + 1)], dim=1)  # [n, passes n]
        full = is_before & (at >= self.num_pad[:, None, None])  # [B, n, S]
        return torch.cat([full, drafted.expand(len(full), -1, -1)], dim=2)[:, None]

    def part(self, where: slice) -> "DraftView":
        n = self.positions.shape[1] if where.stop is None else where.stop
        return replace(self, positions=self.positions[:, :n])

    def on(self, device: torch.device, table: Tensor | None) -> "DraftView":
        raise AssertionError("drafts are measured on one device")
