"""What each check of `benchmarks.gpu_check` is expected to find, written down before it runs, and how long it may take.

Figures are of one H200 (bfloat16, random weights) by the cost model, good to 15 to 20 %; where an H100 has been
measured, that is said; seconds of jobs and ratios to others are guesses. `corpus` and `swiftkv` also compute
predictions of their own, at the rates measured on the device, before they time anything.
"""

from dataclasses import dataclass

LIMIT_S = 120.0
"""Seconds that a check may take on a GPU, compilation of kernels included; four times as many in a dry run."""


@dataclass(frozen=True)
class Planned:
    prediction: str
    limit_s: float = LIMIT_S
    needs_ray: bool = False


PLANNED: dict[str, Planned] = {
    "device": Planned("the device computes and is free; copies read 2.7 TB/s on an H100, about 4 on an H200"),
    "kernels": Planned("Triton's kernels are chosen; cuDNN's attention is off"),
    "tokens": Planned("float32 tokens are a CPU's, as on an H100; nearly all of the time is Triton's compiler"),
    "lane": Planned("every test marked gpu passes: none has run on a GPU since they cover graphs", 240),
    "attention": Planned("our kernel reads at 0.9 or more of torch's best; 28 us a layer of OPT-1.3B at 64 rows"),
    "captures": Planned("10 plans of OPT-1.3B at 18 sizes: 180 graphs in 7 s and 30 MB (H100: 160 in 5.8 s, 27 MB)"),
    "batches": Planned("no graph is captured late, and memory stays flat, as on an H100"),
    "replays": Planned("7 kernels a layer for OPT, 8 for Llama; gaps are 1 to 3 % of a step"),
    "speed": Planned("OPT-1.3B at 256 rows 3.9 ms a step, 2.0 at 2x; at 64 rows 1.6 and 0.9"),
    "sampled": Planned("drawing takes 0.3 to 1 ms of a step at OPT's vocabulary, 1 to 2 ms at Llama 3's"),
    "larger": Planned("OPT-6.7B at 256 rows 12.8 ms a step, 6.5 at 2x (H100: 17.0 and 8.7)"),
    "grouped": Planned("tokens are a CPU's; Llama-3.2-1B at 256 rows 1.3 to 2.0 ms a step, 0.7 to 1.1 at 2x"),
    "fp8": Planned(
        "of the demo model's answers 0.95 stay bfloat16's with fp8 keys and values and 0.77 with fp8 weights too, as "
        "on a CPU; OPT-1.3B at 256 rows 3.9 ms a step, 2.5 and 1.9, at 2x 2.0, 1.3 and 1.0, without the rounding of "
        "what products take in; half the bytes of each"
    ),
    "corpus": Planned(
        "OPT-1.3B 13,700 tokens/s, 22,100 at 2x; Llama-3.1-8B 7,000 and 9,400; SmolLM2-1.7B 12,700 and 20,200. With "
        "full batches and packed prompts 18,900 and 29,900; 10,100 and 13,000; 17,500 and 27,200. Full depth reaches "
        "0.5 to 0.7 of the ceiling until batches are full; 0.7 to 0.8 of the rows that run are useful"
    ),
    "swiftkv": Planned("tokens are a CPU's; prompts take 0.53 of their time with half of the layers"),
    "prefixes": Planned(
        "tokens are equal; prompts take a quarter of their time, steps 0.48 of it: 1.1 ms, in which 1.6 GB of keys and "
        "values are read instead of 6.5 (OPT-1.3B, 64 rows of 512 tokens, 408 of them alike)"
    ),
    "soak": Planned("a batch that does not fit, bad rows and a failed capture change nothing else; memory stays flat"),
    "overlap": Planned("two parts on two GPUs take 1.0 to 1.2 times as long as one"),
    "exact": Planned("every float32 token is transformers', but for a tie in perhaps one row of a thousand"),
    "wrapped": Planned("every float32 token is transformers' own"),
    "peers": Planned("we make 3 times the tokens of generate, compiled with a static cache"),
    "generate_batch": Planned(
        "Llama-3.2-1B: we make 1.5 to 4 times the tokens of generate_batch, whose rows leave and join, with masks "
        "where no flash-attn is installed"
    ),
    "sanitizer": Planned("no error in our kernels", 150),
    "job": Planned("256 rows come back, by Triton's kernels, in 40 s, most of them Ray's", 180, needs_ray=True),
    "resume": Planned("20,000 rows once each after SIGKILL; resuming takes 40 s", needs_ray=True),
    "workers": Planned(
        "two workers hold 0.85 to 0.9 of the GPU together, both answer rows, 12,000 rows once each in 45 s",
        needs_ray=True,
    ),
}
"""By check, in the order in which they run."""
