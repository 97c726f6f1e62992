"""SmolLM2-135M-Instruct generating through `torch.ops.paged_attn.decode`.

Read in this order: `model.py` (the transformer and its paged attention), `engine.py` (continuous
batching over one pool of blocks), then `weights.py`, `dense.py`, `compare.py`, `picture.py` and
`report.py` as needed. Run with `python -m examples.smollm2`.
"""
