"""Check this machine and a configuration before a run, and estimate what the run will take.

    skipdecode doctor
    skipdecode doctor -i prompts.jsonl model.source=my-model --price-per-hour 2.50
    skipdecode doctor --gpu h100

Reports versions, devices, memory, the kernels and batch sizes a run would use, and each problem with its remedy; exit
code 1 means that there are problems. The model is loaded once. With an input, the corpus is read and at most 64 of its
rows are decoded to estimate tokens, hours and cost. --gpu predicts speed and cost on a GPU from its data sheet instead.
Guides: docs/troubleshooting.md, docs/gpu.md.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import ERROR, OK, log, make_parser, read_settings, run_verb, start


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("doctor", __doc__, overrides="configuration keys, e.g. model.source=my-model")
    parser.add_argument(
        "-i",
        "--input",
        action="append",
        metavar="PATH",
        help="prompts to check and to estimate for; may be repeated (input.path)",
    )
    parser.add_argument(
        "--price-per-hour",
        type=float,
        metavar="PRICE",
        help="of all machines together (actors.price_per_hour); with --gpu, of one GPU",
    )
    parser.add_argument("-o", "--output", metavar="PATH", help="the run folder to check (output.path)")
    parser.add_argument("--gpu", metavar="NAME", help="only predict speed and cost on such a GPU (h100, l4, ...)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=256, metavar="N", help="length of each prompt, with --gpu (256)"
    )
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)))


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.doctor.versions import check_versions

    if missing := check_versions().missing:  # checked before anything imports them
        for problem in missing:
            log(f"WRONG: {problem}")
        return {"problems": missing}, ERROR
    from pipeline.config.job import JobConfig, build_config
    from pipeline.config.tree import section_of

    if arguments.gpu is not None:
        from pipeline.doctor.predicted import predicted

        price, settings = arguments.price_per_hour, read_settings(arguments, {})
        is_set = "max_new_tokens" in section_of(settings, "sampling")
        config = build_config(JobConfig, settings)
        num_new = config.sampling.max_new_tokens if is_set else 512
        return predicted(
            arguments.gpu,
            log,
            arguments.prompt_tokens,
            num_new,
            price_per_hour=price,
            quantization=config.model.quantization,
            kv_cache_dtype=config.model.kv_cache_dtype,
        ), OK
    from pipeline.doctor.examine import examine

    flags = {"input.path": arguments.input, "output.path": arguments.output}
    tree = read_settings(arguments, flags | {"actors.price_per_hour": arguments.price_per_hour})
    document = examine(build_config(JobConfig, tree), bool(section_of(tree, "input").get("path")), log)
    show(document)
    return document, ERROR if document["problems"] else OK


def show(document: dict[str, Any]) -> None:
    """Prints the findings to stderr."""
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
        where = f"cluster {ray['address']}" if ray["address"] else "started by the run itself"
        log(f"Ray: {where}, {ray['num_cpus']:g} CPUs, {ray['num_gpus']:g} GPUs, {count(ray['nodes'], 'node')}")
    if choice:
        loaded = "not loaded here" if choice["load_s"] is None else f"loaded in {choice['load_s']:.1f} s"
        log(f"model: {choice['model']}, {choice['layers']} layers, {loaded}")
        weights = "" if choice["quantization"] is None else f", {choice['quantization']} weights,"
        weights += "" if choice["kv_cache_dtype"] == "auto" else f" {choice['kv_cache_dtype']} keys and values,"
        log(f"decoding: {choice['dtype']}{weights} on {choice['device']} with {choice['decode']}")
        if choice["batch_size"] is None:
            log("batch size: only known on a machine that can load the model")
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
