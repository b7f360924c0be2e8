"""The configuration of a run: the frozen tree, and how YAML files and overrides become one."""
