"""The command line: one module per verb, which parses arguments, calls the pipeline and prints. No classes here."""
