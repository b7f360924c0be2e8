"""A model with a chat template that says a given text after each of given prompts, over one script of positions."""

from collections.abc import Callable, Sequence
from pathlib import Path

from actors.generator import Generator
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from tests.support.service_helpers import scripted

POSITIONS = 1600


def speaking(
    checkpoint_factory: Callable[..., Path], folder: Path, template: str, turns: Sequence[tuple[str, str]]
) -> Generator:
    """`turns`: rendered prompts of different lengths, each with its answer, which ends before the next prompt does."""
    source = checkpoint_factory("125m", max_position_embeddings=POSITIONS)
    config = read_config(source)
    tokenizer = Tokenizer(source, config)
    script = tokenizer.encode_rendered(["."])[0] * POSITIONS
    for prompt, answer in turns:
        first = len(tokenizer.encode_rendered([prompt])[0]) - 1
        tokens = [*tokenizer.encode_rendered([answer])[0], *config.eos_token_ids]
        script[first : first + len(tokens)] = tokens
    assert len(script) == POSITIONS, "an answer does not fit"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return scripted(source, folder, script)
