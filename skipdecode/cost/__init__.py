"""What a plan costs: FLOPs, bytes, seconds by the roofline, GPUs by their data sheets. No torch at import."""
