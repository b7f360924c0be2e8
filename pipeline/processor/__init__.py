"""Generation as a stage of a pipeline of one's own: `build_processor`, in a notebook or a script with Ray Data."""

from pipeline.processor.build import Processor, build_processor

__all__ = ["Processor", "build_processor"]
