"""Export the rows of a finished run as a Hugging Face data set, JSON Lines or Parquet.

    skipdecode export outputs/run -o my-dataset
    skipdecode export outputs/run -o answers --format jsonl --columns id,generated_text
    skipdecode export outputs/run --to hf://datasets/me/my-dataset

The default is a data set: Parquet in data/ and a card, README.md, with model, schedule, agreement and speedup;
`datasets.load_dataset("my-dataset")` opens it. The target folder appears complete or not at all. On the Hugging Face
Hub all files are one commit, to a data set that exists and is empty (hf repos create me/my-dataset --type dataset).
Guide: docs/corpus.md.
"""

import argparse
from functools import partial
from typing import Any

from jobs.cli import OK, log, make_folder_parser, run_folder, run_verb, start


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_folder_parser("export", __doc__)
    add = parser.add_argument
    add(
        "-o",
        "--output",
        "--to",
        metavar="FOLDER",
        required=True,
        help="folder or URI to write, or hf://datasets/ORG/NAME[/FOLDER]; must not exist or be empty",
    )
    add("--format", choices=("dataset", "jsonl", "parquet"), default="dataset", help="what to write (dataset)")
    add("--compression", choices=("none", "gzip", "zstd"), help="of the files (zstd for Parquet, none for JSON Lines)")
    add("--columns", metavar="A,B", help="only these columns, in this order")
    add("--rows", choices=("good", "failed", "all"), default="good", help="which rows to export (good)")
    add("--rows-per-file", type=int, default=100_000, metavar="N", help="maximum number of rows in a file (100000)")
    add("--partial", action="store_true", help="export what an unfinished run has so far")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_verb(partial(work, parse(argv)), "interrupted; nothing was exported")


def work(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from pipeline.export.export import export
    from pipeline.export.export_plan import Options

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
