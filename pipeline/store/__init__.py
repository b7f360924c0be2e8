"""Files on disk: the run folder, its lease, the commit of a retry, data files, checkpoints that verbs make."""
