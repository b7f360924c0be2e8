"""`python -m jobs.export OUT -o FOLDER`: the rows of a run as a data set of Hugging Face, JSON Lines or Parquet.

A data set is Parquet in data/ and a card, README.md, that says model, schedule, agreement and speedup; it opens with
`datasets.load_dataset(FOLDER)`. FOLDER is there whole or not at all. In place of OUT a configuration may name the run
folder (`--config FILE`, `output.path=OUT`). The last line on stdout is one JSON document. Exit codes: 0 done; 2 nothing
was written (no finished run, an unknown column, a FOLDER that is not empty); 1 anything else.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import OK, log, make_folder_parser, run_folder, run_verb, start


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_folder_parser("export", __doc__)
    add = parser.add_argument
    add("-o", "--output", metavar="FOLDER", required=True, help="where to: a folder or a URI, empty or not there")
    add("--format", choices=("dataset", "jsonl", "parquet"), default="dataset", help="(dataset)")
    add("--compression", choices=("none", "gzip", "zstd"), help="(zstd for Parquet, none for JSON Lines)")
    add("--columns", metavar="A,B", help="only these, in this order")
    add("--rows", choices=("good", "failed", "all"), default="good", help="which rows (good)")
    add("--rows-per-file", type=int, default=100_000, metavar="N", help="of each file, but the last (100000)")
    add("--partial", action="store_true", help="of a run that is not finished, what there is so far")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)), "interrupted; nothing was exported")


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.export.plan import Options
    from pipeline.export.run import export

    run, _, _ = run_folder(arguments)
    columns = None if arguments.columns is None else [name.strip() for name in arguments.columns.split(",")]
    options = Options(
        run,
        arguments.output,
        format=arguments.format,
        compression=arguments.compression,
        rows=arguments.rows,
        columns=None if columns is None else tuple(name for name in columns if name),
        rows_per_file=arguments.rows_per_file,
        is_partial=arguments.partial,
    )
    document = export(options, log)
    log(f"exported: {arguments.output}")
    return document, OK


if __name__ == "__main__":
    start(main)
