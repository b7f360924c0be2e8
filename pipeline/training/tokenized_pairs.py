"""The training pairs as tokens, and their tokenizer. Every error is a `ConfigError`.

Files are read by `pipeline.input.training_pairs`. Nothing is written here.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.training.workers import Pair
from pipeline.config.job import ConfigError
from pipeline.input.training_pairs import Pairs, encode_pairs, refuse_problems, scan_pairs
from pipeline.store.model_folder import Files, tokenizer_files
from pipeline.training.config import FinetuneData
from pipeline.training.folder import TrainingFolder
from skipdecode.checkpoint.tokenizer import Tokenizer, train_tokenizer
from skipdecode.config.model import DecoderConfig

TOKENS_COMPARED = 256  # pairs

Texts = list[tuple[str, str]]


@dataclass(frozen=True)
class Corpus:
    """The pairs that will be used, and what is wrong with the other rows."""

    texts: Texts
    is_cut: list[bool]
    """For each pair, True if its response was cut and so has no end to be learnt."""
    tokens: list[Pair]
    problems: list[str]


@contextmanager
def blame(prefix: str) -> Iterator[None]:
    """A ValueError of a package below becomes a ConfigError that begins with `prefix`."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError.parse(f"{prefix}{error}") from error


def scan(data: FinetuneData, name: str) -> Pairs:
    """The pairs of `data.path` or `data.validation`."""
    keys = (f"data.{name}", "data.prompt_column", "data.response_column")
    return scan_pairs(getattr(data, name), data.prompt_column, data.response_column, keys)


def make_tokenizer(
    source: Path | None, model_config: DecoderConfig, texts: Texts, earlier: TrainingFolder | None
) -> tuple[Files, Tokenizer]:
    """The tokenizer and its files: of `source`, of the run to resume, or trained on `texts`."""
    with tempfile.TemporaryDirectory() as scratch, blame(""):
        folder = source or (earlier.root if earlier and (earlier.root / "tokenizer.json").is_file() else None)
        if folder is None:
            folder = Path(scratch)
            train_tokenizer((text for pair in texts for text in pair), model_config.vocab_size, folder)
        return tokenizer_files(folder), Tokenizer(folder, model_config)


def check_same_tokens(teacher: Path, tokenizer: Tokenizer, model_config: DecoderConfig, texts: Texts) -> None:
    """ConfigError when the teacher would read the first pairs as other tokens."""
    with blame("model.teacher: "):
        sample = [text for pair in texts[:TOKENS_COMPARED] for text in pair]
        if Tokenizer(teacher, model_config).encode(sample) != tokenizer.encode(sample):
            raise ValueError(f"{teacher} has another tokenizer than the model")


def encode(pairs: Pairs, tokenizer: Tokenizer, model_config: DecoderConfig) -> Corpus:
    """Pairs that fit the model's context; the others become problems."""
    corpus = Corpus([], [], [], list(pairs.problems))
    tokens = encode_pairs(tokenizer, pairs.texts, pairs.is_cut)
    for texts, where, is_cut, (prompt, response) in zip(pairs.texts, pairs.where, pairs.is_cut, tokens, strict=True):
        if not prompt:
            corpus.problems.append(f"{where}: the prompt is empty, and this model has no token that begins a text")
        elif len(prompt) + len(response) <= model_config.max_position_embeddings:
            corpus.texts.append(texts)
            corpus.is_cut.append(is_cut)
            corpus.tokens.append((prompt, response))
        else:
            corpus.problems.append(
                f"{where}: {len(prompt)} prompt and {len(response)} response tokens, "
                f"the model has {model_config.max_position_embeddings} positions"
            )
    return corpus


def refuse_bad_rows(corpus: Corpus, key: str, data: FinetuneData) -> None:
    """ConfigError for bad rows that are not to be left out, and where no good one is left."""
    if data.bad_rows == "fail":
        refuse_problems(corpus.problems, key, "repair them, or leave them out with data.bad_rows=skip")
    if not corpus.tokens:
        refuse_problems(corpus.problems, key, "no good row is left")


def digest_pairs(corpus: Corpus) -> str:
    total = hashlib.sha256()
    for (prompt, response), is_cut in zip(corpus.texts, corpus.is_cut, strict=True):
        total.update(f"{len(prompt)} {prompt}{len(response)} {response}{' cut' * is_cut}".encode())
    return total.hexdigest()
