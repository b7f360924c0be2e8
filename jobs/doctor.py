"""`python -m jobs.doctor`: versions, devices, free memory, what a run would choose here, and what is wrong.

`--gpu NAME` looks at nothing: it predicts what runs should cost on such a GPU, from its data sheet.
Takes the configuration of a run (`--config`, `-i`, `-o`, `key=value`), loads its model once, and starts nothing else.
With an input it says what the corpus will take: tokens in and out, hours, and with `--price-per-hour` the cost. For
that it reads the input once, decodes at most 64 rows of it, and one batch of made-up ones.
The last line on stdout is one JSON document. Exit codes: 0 nothing is wrong; 1 something is (the list is on stderr);
2 bad configuration.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import ERROR, OK, log, make_parser, read_settings, run_verb, start


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("doctor", __doc__, overrides="dotted keys, e.g. model.source=my-model")
    parser.add_argument("-i", "--input", action="append", metavar="PATH", help="prompts to look at too: input.path")
    parser.add_argument(
        "--price-per-hour",
        type=float,
        metavar="PRICE",
        help="of all machines of the run: actors.price_per_hour; with --gpu of one GPU",
    )
    parser.add_argument("-o", "--output", metavar="PATH", help="the run folder: output.path")
    parser.add_argument("--gpu", metavar="NAME", help="what runs should cost on such a GPU (h100, l4, ...); no more")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="with --gpu: of every prompt")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)))


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.doctor.versions import check_versions

    if missing := check_versions().missing:  # before anything that needs it is imported
        for problem in missing:
            log(f"WRONG: {problem}")
        return {"problems": missing}, ERROR
    from pipeline.config.job import JobConfig, build_config
    from pipeline.config.tree import section_of

    if arguments.gpu is not None:
        from pipeline.doctor.predicted import predicted

        price, settings = arguments.price_per_hour, read_settings(arguments, {})
        is_set = "max_new_tokens" in section_of(settings, "sampling")
        num_new = build_config(JobConfig, settings).sampling.max_new_tokens if is_set else 512
        return predicted(arguments.gpu, log, arguments.prompt_tokens, num_new, price_per_hour=price), OK
    from pipeline.doctor.examine import examine

    flags = {"input.path": arguments.input, "output.path": arguments.output}
    tree = read_settings(arguments, flags | {"actors.price_per_hour": arguments.price_per_hour})
    document = examine(build_config(JobConfig, tree), bool(section_of(tree, "input").get("path")), log)
    show(document)
    return document, ERROR if document["problems"] else OK


def show(document: dict[str, Any]) -> None:
    """For a human, on stderr."""
    from pipeline.formatting import count

    machine, choice, ray = document["machine"], document["choice"], document["ray"]
    log(", ".join(f"{name} {machine[name]}" for name in ("torch", "ray", "pyarrow", "numpy", "tokenizers")))
    log(
        f"machine: {machine['device']}, {machine['usable_cores']} cores, "
        f"{gib(machine['free_memory_bytes'])} of {gib(machine['memory_bytes'])} memory free"
    )
    for gpu in document["gpus"]:
        memory = f"{gib(gpu['free_memory_bytes'])} of {gib(gpu['memory_bytes'])} free"
        log(f"GPU: {gpu['name']}, compute capability {gpu['capability']}, {memory}")
    if not document["gpus"]:
        log("GPU: none")
    if ray:
        where = f"cluster {ray['address']}" if ray["address"] else "would be started in the run's own process"
        log(f"Ray: {where}, {ray['num_cpus']:g} CPUs, {ray['num_gpus']:g} GPUs, {count(ray['nodes'], 'node')}")
    if choice:
        loaded = "not loaded here" if choice["load_s"] is None else f"loaded in {choice['load_s']:.1f} s"
        log(f"model: {choice['model']}, {choice['layers']} layers, {loaded}")
        weights = "" if choice["quantization"] is None else f", {choice['quantization']} weights,"
        log(f"would decode in {choice['dtype']}{weights} on {choice['device']} with {choice['decode']}")
        if choice["batch_size"] is None:
            log("batch size: known on a machine that can load the model only")
        else:
            sizes = ", ".join(f"{size} (up to {bucket} tokens)" for bucket, size in choice["batch_size"].items())
            log(f"batch size by prompt length: {sizes}")
    for problem in document["problems"]:
        log(f"WRONG: {problem}")
    found = {kind: len(document[f"{kind}s"]) for kind in ("problem", "warning")}
    log(", ".join(count(number, kind) for kind, number in found.items() if number) or "nothing is wrong")


def gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


if __name__ == "__main__":
    start(main)
