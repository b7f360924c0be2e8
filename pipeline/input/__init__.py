"""The door for prompts: `InputConfig` -> files -> a plan -> blocks of rows that all have the same columns.

    files.list_input -> scan.scan_file per file (anywhere) -> plan.plan_input -> read.read_file per file (anywhere)

Invariants: a row in the input is a row out, good or failed; scan and read count the same rows and give the
same ids; an id that a row does not bring itself is `file:row`, `file` relative to the folder that was given,
so that moving or mounting the corpus elsewhere changes nothing. What is wrong with the input as a whole (a
path, a format, a column) is a `ConfigError` before anything starts; what is wrong with a row is that row's
`error_code`.

Which ids occur twice is `match`'s to say, for parts of all rows, wherever they are (`generate.row_index`); the driver
needs 16 bytes per duplicate and a bit per row that is done. Only `source` knows Ray. Left out: tokens and the length
of prompts (`stages.tokens`), and a single line of 2 GiB or more, which Arrow's `string` cannot hold.
"""
