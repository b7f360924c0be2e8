"""What would make first calls slow, done when a model loads: thread pools start, kernels are chosen and compiled.

Which kernels there are, the back end knows: some are compiled for numbers of rows (`Backend.rows_to_try`). Steps as
CUDA graphs meet all of theirs when they are captured (`step_graphs`). Steps without, of continuous batches, of layers
on several devices or of rows that decide on their blocks, meet theirs here.
"""

from skipdecode.backends.device import backend_on
from skipdecode.decoder import Decoder
from skipdecode.generate import generate
from skipdecode.plan import Schedule
from skipdecode.request import Request
from skipdecode.sampling import Sampling
from skipdecode.step_graphs import StepGraphs

ROWS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 4


def warm_up(model: Decoder, schedule: Schedule, graphs: StepGraphs | None = None, *, max_rows: int = ROWS) -> None:
    """Decodes small batches of rows that nobody wants. `max_rows`: of later batches that run without graphs."""
    parts = 1 if model.placement is None else model.placement.num_parts
    for _ in range(2):
        _decode(model, schedule, graphs, ROWS)
    if not (sizes := backend_on(model.device).rows_to_try(-(-max_rows // parts))):
        return
    _decode(model, schedule, graphs, ROWS, temperature=1.0)
    if graphs is None or not schedule.is_settled:
        for rows in sizes:
            _decode(model, schedule, None, rows * parts)


def _decode(
    model: Decoder, schedule: Schedule, graphs: StepGraphs | None, rows: int, *, temperature: float = 0.0
) -> None:
    sampling = Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=temperature)
    request = Request("warm-up", [model.config.filler_token_id] * PROMPT_TOKENS, sampling)
    generate(model, [request] * rows, schedule, graphs=graphs)
