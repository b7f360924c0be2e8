"""Where keys and values lie: padded (rows that start together), ragged (rows of different ages), graphed (CUDA graphs).

What a forward call sees of them is a view (`view`). Most are beside their memory. Two have modules of their own: of
prompts without their padding (`unpadded`), and of several new columns of a row (`tokens`). The teacher-forced pass,
which keeps none, has its own (`skipdecode.model.teacher_forcing`).
"""
