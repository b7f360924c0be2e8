"""An estimate in words."""

from pipeline.estimate.forecast import Estimate
from pipeline.formatting import count, duration


def lines(estimate: Estimate) -> list[str]:
    """Tokens in and out, then time and cost."""
    about = f"corpus: {count(estimate.rows, 'row')}, about {estimate.input_tokens:,} prompt tokens and "
    if estimate.output_tokens is None:
        found = [f"{about}at most {estimate.max_output_tokens:,} new ones (from {count(estimate.sampled_rows, 'row')})"]
    else:
        found = [f"{about}{estimate.output_tokens:,} new ones ({count(estimate.decoded_rows, 'row')} decoded here)"]
    if estimate.duration_s is not None:
        found.append(f"expected: {hours(estimate.duration_s, estimate.cost)} with {count(estimate.actors, 'actor')}")
    return found


def hours(duration_s: float, cost: float | None) -> str:
    price = "" if cost is None else f", costs {cost:,.2f}"
    return f"{duration(duration_s)} ({duration_s / 3600:.2f} h{price})"
