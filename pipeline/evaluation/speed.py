"""Speed figures of one setting, from the batch records of the generator."""

import pyarrow as pa
import pyarrow.compute as pc

from actors.generator import WindowResult
from pipeline.evaluation.documents import PrefillSpeedup, SpeedFigures
from pipeline.report.batches import BatchTotals, agreement, ratio, speedup
from pipeline.report.document import Agreement, Speedup
from pipeline.report.metrics_schemas import BATCH_SCHEMA


def speed_figures(result: WindowResult, batch_size: int, *, is_full: bool) -> SpeedFigures:
    """Layers per decode step as run, tokens per second, speedup and agreement; full depth is 1 by definition.

    `batch_size`: the most rows that were decoded at a time.
    """
    table = pa.Table.from_pylist(result.batches, schema=BATCH_SCHEMA)
    rows, tokens = _sum(table, "rows"), _sum(table, "output_tokens")
    prefill_s, decode_s = _sum(table, "prefill_s"), _sum(table, "decode_s")
    layers, ffns = _sum(table, "layers_run"), _sum(table, "ffns_run")
    totals = BatchTotals.of([table])
    return {
        "rows_per_s": ratio(rows, prefill_s + decode_s),
        "prefill_ms_per_row": ratio(1e3 * prefill_s, rows),
        "decode_ms_per_row": ratio(1e3 * decode_s, rows),
        "cache_bytes_per_row": ratio(
            _sum(table, "cache_bytes"), sum(min(n, batch_size) for n in table["rows"].to_pylist())
        ),
        "speedup_prefill": {"measured": 1.0, "predicted": 1.0} if is_full else prefill_speedup(table),
        "layers_per_token": ratio(layers, tokens - rows),
        "ffn_skip_share": 1 - ffns / layers if layers else None,
        "output_tokens_per_s": ratio(tokens, prefill_s + decode_s),
        "speedup": _speedup(totals, is_full=is_full),
        "agreement": _agreement(totals, is_full=is_full),
    }


def prefill_speedup(table: pa.Table) -> PrefillSpeedup:
    """Time for the prompts at full depth over time for them, over the batches decoded both ways; and as predicted."""
    pairs = table.filter(pc.is_valid(table["full_prefill_s"]))
    return {
        "measured": ratio(_sum(pairs, "full_prefill_s"), _sum(pairs, "prefill_s")),
        "predicted": ratio(_sum(pairs, "full_predicted_prefill_s"), _sum(pairs, "predicted_prefill_s")),
    }


def _speedup(totals: BatchTotals, *, is_full: bool) -> Speedup:
    found = speedup(totals)
    return {
        "measured": 1.0 if is_full else found["measured"],
        "ci95": found["ci95"],
        "measured_decode": 1.0 if is_full else found["measured_decode"],
        "layers": found["layers"],
        "predicted": 1.0 if is_full else found["predicted"],
        "batches": found["batches"],
    }


def _agreement(totals: BatchTotals, *, is_full: bool) -> Agreement:
    found = agreement(totals)
    return {
        "exact_rows": 1.0 if is_full else found["exact_rows"],
        "token_match": 1.0 if is_full else found["token_match"],
        "rows": found["rows"],
    }


def _sum(table: pa.Table, name: str) -> float:
    column: list[float] = table[name].to_pylist()
    return sum(column)
