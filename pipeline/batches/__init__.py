"""OpenAI's files and batches: where they are kept, what a batch is, and the queue that runs them as jobs of `generate`.

The HTTP routes are in `pipeline.service.batch_routes`.
"""
