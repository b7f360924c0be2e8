"""Where keys and values lie: padded (rows that start together), ragged (rows of different ages), graphed (CUDA graphs).

The teacher-forced pass, which keeps none, has a view of its own (`skipdecode.forced`).
"""
