"""The input: `InputConfig` -> a listing of files -> a plan -> blocks of rows that all have the same columns.

    files.list_input -> scan.scan_file per file (anywhere) -> input_plan.plan_input
    -> read.read_file per file (anywhere)

`formats` picks the reader of a format: `line_reader` (text), `csv_rows`, `json_rows` and `openai_rows` read lines;
Parquet and Arrow (`arrow_files`) come in record batches, whose memory `memory_limits` bounds. `columns` checks and
casts columns, `arrow_types` finds a type for them. `prompt_templates` makes prompts, `expansion` turns documents into
output rows, `ids` and `id_matching` tell rows apart, and `datasource` hands it all to Ray Data, which no other module
here imports.
`sample_prompts` and `training_pairs` read small inputs for those who measure and train.

What holds for every input: a row in is a row out, good or failed. Scan and read count the same rows and give the same
ids. A row without an id gets `file:row`, with the file relative to the folder that was given, so that moving or
mounting the corpus elsewhere changes nothing. What is wrong with the input as a whole (a path, a format, a column) is a
`ConfigError` before anything starts; what is wrong with a row is that row's `error_code`. Tokens and the length of
prompts are handled in `stages.tokenize`.
"""
