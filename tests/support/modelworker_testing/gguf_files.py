"""GGUF files of tiny random models and freshly trained tokenizers, as converters write them."""

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from modelworker.worker.gguf.tokenizer import STYLES
from modelworker.worker.import_gguf import ImportSummary, import_gguf
from modelworker.worker.progress import LogProgress

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234567 times faster, isn't it?",
    "def step(batch):\n    return batch.tokens[0:10]  # comment\n\n\n",
    "naïve café — 日本語のテキスト 🙂🙃 Straße ÀÉÎ",
    "the cat sat on the mat and the bat sat on the cat " * 4,
]
TEXTS = [
    *CORPUS,
    *("", " ", "  two  spaces", "\n\n\ttabs\tand\r\nlines ", "12 123 1234 12345.67", "I'LL we've THEY'RE", "ümlaut…"),
    *("aaaaaaaaaaa", "<|start|>hello<|end|> again", "x<|end|>", "\u0301combining", "\U0001f468\u200d\U0001f469\u200d\U0001f467"),
]


@dataclass
class Recipe:
    """A GGUF file to be written: start from a good one, change something, write."""

    fields: dict[str, Any]
    tensors: dict[str, np.ndarray]
    types: dict[str, GGMLQuantizationType] = field(default_factory=dict)
    architecture: str = "llama"

    def write(self, path: Path) -> Path:
        """Writes the file. A numpy array is quantized to the tensor's type (fp32 where none is given)."""
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.fields.items():
            add_field(writer, key, value)
        for name, values in self.tensors.items():
            kind = self.types.get(name, GGMLQuantizationType.F32)
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def permuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As convert_hf_to_gguf.py of llama.cpp writes q and k."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
    )


def recipe_of(model: LlamaForCausalLM, tokenizer_fields: dict[str, Any], *, extra: dict[str, Any] | None = None) -> Recipe:
    """A model as a converter writes it."""
    config = model.config
    renamed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    stems = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    tensors = {}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name in renamed:
            if not (name == "lm_head.weight" and config.tie_word_embeddings):
                tensors[renamed[name]] = values
            continue
        _, _, layer, rest = name.split(".", 3)
        stem, kind = rest.rsplit(".", 1)
        heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}.get(stem)
        tensors[f"blk.{layer}.{stems[stem]}.{kind}"] = permuted(values, heads) if heads else values
    fields = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        **tokenizer_fields,
        **(extra or {}),
    }
    return Recipe(fields=fields, tensors=tensors)


def tiny_model(**changes: Any) -> LlamaForCausalLM:
    """A random Llama in fp32 whose biases, where it has any, and norms aren't their neutral values."""
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "vocab_size": 640,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.08 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def logits(model: LlamaForCausalLM, num_positions: int = 48) -> torch.Tensor:
    """The logits of a fixed text."""
    tokens = torch.arange(num_positions).mul(37).remainder(640)[None]
    with torch.inference_mode():
        return model(tokens).logits[0].float()


def load(directory: Path) -> LlamaForCausalLM:
    """The imported directory as transformers sees it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def byte_level_source(style: str = "gpt-2") -> tuple[Tokenizer, dict[str, Any]]:
    """A trained byte-level BPE tokenizer, and the fields that a converter writes for it."""
    tokenizer = Tokenizer(tokenizer_models.BPE(ignore_merges=STYLES[style].ignore_merges))
    tokenizer.pre_tokenizer = STYLES[style].words()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(tokenizer.get_vocab_size())]
    kinds = {"<|start|>": TokenType.CONTROL, "<|end|>": TokenType.CONTROL, "<tool>": TokenType.USER_DEFINED}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokenizer, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": style,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kinds.get(token, TokenType.NORMAL)) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def imported(recipe: Recipe, folder: Path, **options: Any) -> tuple[Path, ImportSummary]:
    """Writes and imports a file."""
    path = recipe.write(folder / "model.gguf")
    directory = folder / "model"
    return directory, import_gguf(path, directory, progress=LogProgress(), **options)


def sentencepiece_encode(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's BPE by its definition: of all neighbours, those whose union has the best score are merged, leftmost first."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    pieces = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [(-scores[ids[a + b]], place) for place, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]
        if not pairs:
            break
        place = min(pairs)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return [
        token_id
        for piece in pieces
        for token_id in ([ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()])
    ]


def sentencepiece_fields() -> dict[str, Any]:
    """The vocabulary of a SentencePiece BPE model: control tokens, bytes, merged pieces from best to worst, characters."""
    trained = Tokenizer(tokenizer_models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    merged = ["".join(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    characters = sorted({character for piece in merged for character in piece})
    merged = list(dict.fromkeys(merged))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *characters]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [TokenType.NORMAL] * (len(tokens) - len(kinds))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(-rank) for rank in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
