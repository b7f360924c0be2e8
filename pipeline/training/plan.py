"""What is checked before a fine-tuning starts: base model, schedules, pairs, output folder. All errors: `ConfigError`.

Nothing is written here, and Ray is not started.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.tokenizer import OPTTokenizer, train_tokenizer
from actors.train_workers import Pair
from actors.trainer import TrainConfig, num_steps
from pipeline.config import ConfigError
from pipeline.demo_corpus import vary_names
from pipeline.input.pairs import Pairs, encode_pairs, refuse_problems, scan_pairs
from pipeline.store.digest import digest_files
from pipeline.training.config import HOW, FinetuneConfig, FinetuneData, FinetuneModel, TrainSection
from pipeline.training.folder import TOKENIZER_FILES, TrainingFolder, check_apart
from pipeline.units import Note
from skipdecode.config import OPTConfig, SwiftKVConfig
from skipdecode.hub import resolve_source
from skipdecode.schedule import listed_schedule
from skipdecode.weights import check_folder

CODE_VERSION = 2  # raise when a change alters the weights that the same configuration gives

TOKENS_COMPARED = 256  # pairs

Texts = list[tuple[str, str]]
Files = dict[str, bytes]
"""Name -> contents."""


@dataclass(frozen=True)
class Corpus:
    """The pairs that will be used, and what is wrong with the other rows."""

    texts: Texts
    tokens: list[Pair]
    problems: list[str]


@dataclass(frozen=True)
class PlannedTraining:
    """A fine-tuning that was found possible."""

    config: FinetuneConfig
    train: TrainConfig
    folder: TrainingFolder
    earlier: dict[str, Any] | None
    """`training/run.json` of the run to resume."""
    source: Path | None
    """The folder of the model to start from; None: from scratch."""
    opt: OPTConfig
    """With the schedule and the SwiftKV shape that the result carries."""
    teacher: Path | None
    """The folder of the teacher; None: the model itself."""
    tokenizer: Files
    pairs: Corpus
    validation: Corpus
    num_steps: int
    fingerprint: dict[str, Any]
    """Everything that decides the weights, flat: a resumed run must agree in every entry."""


def plan_training(config: FinetuneConfig, note: Note) -> PlannedTraining:
    """Checks everything that needs no cluster, cheapest first."""
    folder, earlier = _check_output(config)
    source, opt = _check_model(config.model)
    before, opt = opt.swiftkv, replace(opt, swiftkv=_check_swiftkv(config, opt))
    if before is not None:
        wanted = "none are asked for (model.swiftkv)" if opt.swiftkv is None else "another shape is asked for"
        done = "are where training starts" if before == opt.swiftkv else f"are left out: {wanted}"
        note(f"model.source: SwiftKV's weights in {config.model.source} {done}")
    default = check_schedules(config.train, opt)
    if config.train.trainable == "all":
        opt = replace(opt, skip_decode=default, ffn_skip=None)
        if opt.swiftkv and all(entry.get("prefill") == "swiftkv" for entry in config.train.schedules):
            note("train.schedules: all have prefill: swiftkv, so the model will need prefill.method=swiftkv")
    elif config.train.default_schedule is not None:  # the model stays as it is, and so does what it carries
        opt = replace(opt, skip_decode=default)
    teacher = _check_teacher(config, source, opt)
    pairs, validation = _scan(config.data, "path"), _scan(config.data, "validation")
    pairs = replace(pairs, texts=list(vary_names(pairs.texts, config.data.made_names_share, config.train.seed)))
    files, tokenizer = _make_tokenizer(source, opt, pairs.texts, folder if earlier else None)
    if teacher is not None:
        _check_same_tokens(teacher, tokenizer, opt, pairs.texts)
    train, held_out = (_encode(found, tokenizer, opt) for found in (pairs, validation))
    for corpus, name in ((train, "path"), (held_out, "validation")):
        _refuse(corpus, f"data.{name}", config.data)
    recipe = train_config(config.train)
    steps = num_steps(len(train.tokens), recipe)
    note(
        f"data: {len(train.tokens)} pairs in {steps} steps of {recipe.batch_size}, {len(held_out.tokens)} pairs for "
        f"validation; {len(train.problems) + len(held_out.problems)} bad rows left out"
    )
    prints = _fingerprint(config, source, opt, teacher, train, held_out)
    return PlannedTraining(config, recipe, folder, earlier, source, opt, teacher, files, train, held_out, steps, prints)


def train_config(section: TrainSection) -> TrainConfig:
    return TrainConfig(**section.model_dump(exclude={"default_schedule"}))


def _check_output(config: FinetuneConfig) -> tuple[TrainingFolder, dict[str, Any] | None]:
    folder = TrainingFolder.open(config.output.path)
    others = [(f"data.{name}", path) for name in ("path", "validation") for path in getattr(config.data, name)]
    models = [(f"model.{name}", getattr(config.model, name)) for name in ("source", "teacher")]
    check_apart(folder, others + [(key, path) for key, path in models if path is not None])
    existing = next(path for path in (folder.root, *folder.root.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(
            "output.path", f"{folder.root} cannot be created: {existing} is no folder that we may write to"
        )
    return folder, folder.check(config.output.if_exists)


def _check_model(model: FinetuneModel) -> tuple[Path | None, OPTConfig]:
    """Where the weights are, and their shape."""
    if model.source is None:
        with _blame("model.shape: "):
            return None, OPTConfig(**model.shape.model_dump())
    with _blame(""):
        folder = resolve_source(model.source)
        opt = OPTConfig.from_folder(folder)
        check_folder(folder)
    return folder, opt


def _check_swiftkv(config: FinetuneConfig, opt: OPTConfig) -> SwiftKVConfig | None:
    """The shape that the model is given; None: it gets none."""
    wanted = config.model.swiftkv
    if wanted is None:
        if config.train.trainable == "swiftkv":
            raise ConfigError("train.trainable", "swiftkv needs model.swiftkv, the shape of what is to be trained")
        return None
    if config.model.source is None:
        raise ConfigError("model.swiftkv", "its weights are taken from a trained model's; give model.source")
    with _blame("model."):
        shape = wanted.shape(opt)
    if config.train.parallel == "fsdp":
        raise ConfigError("train.parallel", "fsdp gathers whole layers, and SwiftKV runs parts of them; use ddp")
    if shape.num_shared(opt) == 0:
        raise ConfigError(
            "model.swiftkv.kv_layers", f"all {shape.kv_layers} layers keep their own K/V: nothing to train"
        )
    return shape


def _check_teacher(config: FinetuneConfig, source: Path | None, opt: OPTConfig) -> Path | None:
    if config.model.teacher is None:
        is_moving = config.train.trainable == "all" and (config.train.distill or config.train.hidden)
        return source if opt.swiftkv is not None and is_moving else None
    if not config.train.distill and not config.train.hidden:
        raise ConfigError("model.teacher", "is not asked with train.distill and train.hidden 0")
    with _blame(""):
        folder = resolve_source(config.model.teacher, "model.teacher")
    with _blame("model.teacher: "):
        taught = OPTConfig.from_folder(folder)
        check_folder(folder)
        if taught.vocab_size != opt.vocab_size:
            raise ValueError(f"{config.model.teacher} has {taught.vocab_size} token ids, the model {opt.vocab_size}")
        if taught.max_position_embeddings < opt.max_position_embeddings:
            raise ValueError(f"{config.model.teacher} has {taught.max_position_embeddings} positions only")
        if config.train.hidden and taught.hidden_size != opt.hidden_size:
            raise ValueError(f"its states are {taught.hidden_size} wide, not {opt.hidden_size} as train.hidden needs")
    return folder


def _check_same_tokens(teacher: Path, tokenizer: OPTTokenizer, opt: OPTConfig, texts: Texts) -> None:
    """ConfigError when the teacher would read the first pairs as other tokens."""
    with _blame("model.teacher: "):
        sample = [text for pair in texts[:TOKENS_COMPARED] for text in pair]
        if OPTTokenizer(teacher, opt).encode(sample) != tokenizer.encode(sample):
            raise ValueError(f"{teacher} has another tokenizer than the model")


@contextmanager
def _blame(prefix: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("", f"{prefix}{error}") from error


def check_schedules(train: TrainSection, opt: OPTConfig) -> dict[str, Any]:
    """The schedule that the checkpoint will carry; ConfigError for one that this model cannot run."""
    found: list[dict[str, Any]] = []
    for index, decode in enumerate(train.schedules):
        key, is_swift = f"train.schedules[{index}]", decode.get("prefill") == "swiftkv"
        _check_schedule(key, decode, train.horizon, opt)
        defaults = {"method": "skipdecode", "prefill": "full"}
        found.append(defaults | {name: value for name, value in decode.items() if value is not None})
        if found[-1] in found[:-1]:  # of a shallow model two different ones may come to the same layers
            raise ConfigError(key, f"{decode} is there twice")
        if train.trainable == "swiftkv" and not is_swift:
            raise ConfigError(key, "without prefill: swiftkv it runs nothing that train.trainable=swiftkv trains")
    if opt.swiftkv is not None and not any(decode.get("prefill") == "swiftkv" for decode in train.schedules):
        raise ConfigError("train.schedules", "none has prefill: swiftkv, which model.swiftkv is for")
    default = train.default_schedule
    if default is None:
        whole = [given for given in train.schedules if given.get("prefill") != "swiftkv"] or train.schedules
        plain = [{key: value for key, value in given.items() if key != "prefill"} for given in whole]
        skipping = [decode for decode in plain if decode.get("method", "skipdecode") != "full"]
        wanted = {"method": "skipdecode", "speedup": 2}
        default = wanted if wanted in skipping else skipping[0] if skipping else {"method": "full"}
    if "prefill" in default:
        raise ConfigError("train.default_schedule.prefill", "a checkpoint carries no prefill; jobs.generate is told it")
    _check_schedule("train.default_schedule", default, train.horizon, opt)
    default = {"method": "skipdecode"} | {key: value for key, value in default.items() if value is not None}
    falls = default["method"] in ("skipdecode", "early_exit")
    return default | ({"horizon": default.get("horizon", train.horizon)} if falls else {})


def _check_schedule(key: str, decode: dict[str, Any], horizon: int, opt: OPTConfig) -> None:
    if decode.get("ffn_skip") is not None:
        raise ConfigError(
            f"{key}.ffn_skip", "FFN-SkipLLM needs no training; give it to jobs.calibrate and jobs.generate"
        )
    try:
        listed_schedule(opt, decode, horizon + 1)
    except ValueError as error:
        raise ConfigError.parse(str(error).replace("decode.", f"{key}.").replace("decode: ", f"{key}: ")) from error


def _scan(data: FinetuneData, name: str) -> Pairs:
    keys = (f"data.{name}", "data.prompt_column", "data.response_column")
    return scan_pairs(getattr(data, name), data.prompt_column, data.response_column, keys)


def _make_tokenizer(
    source: Path | None, opt: OPTConfig, texts: Texts, earlier: TrainingFolder | None
) -> tuple[Files, OPTTokenizer]:
    """The tokenizer and its files: of `source`, of the run to resume, or trained on `texts`."""
    with tempfile.TemporaryDirectory() as scratch, _blame(""):
        folder = source or (earlier.root if earlier and (earlier.root / "tokenizer.json").is_file() else None)
        if folder is None:
            folder = Path(scratch)
            train_tokenizer((text for pair in texts for text in pair), opt.vocab_size, folder)
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
        return files, OPTTokenizer(folder, opt)


def _encode(pairs: Pairs, tokenizer: OPTTokenizer, opt: OPTConfig) -> Corpus:
    """Pairs that fit the model's context; the others become problems."""
    corpus = Corpus([], [], list(pairs.problems))
    tokens = encode_pairs(tokenizer, pairs.texts, opt.eos_token_id)
    for texts, where, (prompt, response) in zip(pairs.texts, pairs.where, tokens, strict=True):
        if len(prompt) + len(response) <= opt.max_position_embeddings:
            corpus.texts.append(texts)
            corpus.tokens.append((prompt, response))
        else:
            corpus.problems.append(
                f"{where}: {len(prompt)} prompt and {len(response)} response tokens, "
                f"the model has {opt.max_position_embeddings} positions"
            )
    return corpus


def _refuse(corpus: Corpus, key: str, data: FinetuneData) -> None:
    if data.bad_rows == "fail":
        refuse_problems(corpus.problems, key, "repair them, or leave them out with data.bad_rows=skip")
    if not corpus.tokens:
        refuse_problems(corpus.problems, key, "no good row is left")


def _fingerprint(
    config: FinetuneConfig, source: Path | None, opt: OPTConfig, teacher: Path | None, train: Corpus, validation: Corpus
) -> dict[str, Any]:
    entries: dict[str, Any] = {"code_version": CODE_VERSION, "output.dtype": stored_dtype(config, opt)}
    recipe = config.train.model_dump(mode="json", exclude=set(HOW))
    recipe["default_schedule"] = opt.skip_decode
    entries |= {f"train.{key}": value for key, value in recipe.items()}
    if source is None:
        entries |= {f"model.shape.{key}": value for key, value in config.model.shape.model_dump().items()}
    else:
        entries["model.files"] = digest_files(source)  # its tokenizer's too
    entries["model.swiftkv"] = None if opt.swiftkv is None else vars(opt.swiftkv)
    entries["model.teacher_files"] = None if teacher is None else digest_files(teacher)
    entries["data.pairs"], entries["data.validation_pairs"] = _digest(train.texts), _digest(validation.texts)
    return entries


def stored_dtype(config: FinetuneConfig, opt: OPTConfig) -> str:
    """Of the weights in the output, the default settled."""
    if config.output.dtype is not None or config.train.trainable == "all":
        return config.output.dtype or "bfloat16"
    return opt.torch_dtype if opt.torch_dtype in ("float32", "bfloat16", "float16") else "float32"


def _digest(texts: Sequence[tuple[str, str]]) -> str:
    total = hashlib.sha256()
    for prompt, response in texts:
        total.update(f"{len(prompt)} {prompt}{len(response)} {response}".encode())
    return total.hexdigest()
