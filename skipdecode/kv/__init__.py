"""Keys and values: where they are stored, and what a forward call sees of them.

There are three stores: `static_cache` for rows that start together, `slot_cache` for rows that come and go, and
`graph_cache` for decode steps that are CUDA graphs. A forward call works on a view of its store (`view`). The
teacher-forced pass stores nothing and has a view of its own (`skipdecode.model.teacher_forcing`).
"""
