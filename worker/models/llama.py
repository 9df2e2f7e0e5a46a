"""The Llama decoder, which as configuration also serves Mistral, Qwen2 and Qwen3."""

from collections.abc import Callable, Iterator
from typing import TypedDict

import torch
from torch import Tensor, nn

from modelworker.ops.activation import SiluAndMul
from modelworker.ops.norm import RMSNorm
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.replaceable import PluggableLayer
from modelworker.ops.sampling import SampleTokens
from modelworker.worker.models.attention import Attention
from modelworker.worker.models.causal_lm import AttentionMetadata, CausalLM, KvCaches
from modelworker.worker.models.config import ModelConfig
from modelworker.worker.models.embedding import ParallelLMHead, VocabParallelEmbedding
from modelworker.worker.models.linear import MergedColumnParallelLinear, OutputPart, QKVParallelLinear, RowParallelLinear
from modelworker.worker.models.rope import RotaryAngles, make_rotary_embedding
from modelworker.worker.models.tensor_parallel import TensorParallel


class _LayerOptions(TypedDict):
    dtype: torch.dtype
    ops: OpSettings
    tp_rank: int
    tp_size: int


@PluggableLayer.register("llama_attention")
class LlamaAttention(PluggableLayer):
    """Grouped-query attention with RoPE; with Qwen3's norm of each head where the configuration says so."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: ModelConfig, *, layer: int, prefix: str, options: _LayerOptions) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_dim=config.head_dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            bias=config.qkv_bias,
            prefix=f"{prefix}.qkv_proj",
            **options,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias, prefix=f"{prefix}.o_proj", **options
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(config.head_dim, eps=config.rms_norm_eps, dtype=options["dtype"], ops=options["ops"]) for _ in range(2)
            )
        self.attn = Attention(
            head_dim=config.head_dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            window=config.windows[layer],
            eps=config.rms_norm_eps,
            ops=options["ops"],
        )

    def forward(self, x: Tensor, angles: RotaryAngles, attention: AttentionMetadata, kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """Hot path: [num_tokens, hidden_size] to the same."""
        query, key, value = self.qkv_proj.heads(x)
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        return self.o_proj(self.attn(query, key, value, norms, angles, attention, kv_cache).flatten(1))


@PluggableLayer.register("llama_mlp")
class LlamaMLP(PluggableLayer):
    """Computes down(silu(gate(x)) * up(x))."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: ModelConfig, *, prefix: str, options: _LayerOptions) -> None:
        super().__init__()
        outputs = (OutputPart("gate_proj", config.intermediate_size), OutputPart("up_proj", config.intermediate_size))
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, outputs, bias=config.mlp_bias, prefix=f"{prefix}.gate_up_proj", **options
        )
        self.act = SiluAndMul(ops=options["ops"])
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=config.mlp_bias, prefix=f"{prefix}.down_proj", **options
        )

    def forward(self, x: Tensor) -> Tensor:
        """Hot path: [num_tokens, hidden_size] to the same."""
        return self.down_proj(self.act(self.gate_up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: ModelConfig, *, layer: int, prefix: str, options: _LayerOptions) -> None:
        super().__init__()
        eps, dtype, ops = config.rms_norm_eps, options["dtype"], options["ops"]
        self.input_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype, ops=ops)
        self.self_attn = LlamaAttention(config, layer=layer, prefix=f"{prefix}.self_attn", options=options)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype, ops=ops)
        self.mlp = LlamaMLP(config, prefix=f"{prefix}.mlp", options=options)

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        angles: RotaryAngles,
        attention: AttentionMetadata,
        kv_cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Hot path: adds x, the output of the layer before (None in the first), to the residual stream and returns its own output.

        Args:
            x: [num_tokens, hidden_size], used up.
            residual: [num_tokens, hidden_size], changed.
            angles: RoPE's, of the step's tokens.
            attention: the step's sequences.
            kv_cache: of this layer.
        """
        if x is None:
            x = self.input_layernorm(residual)
        else:
            self.input_layernorm.add(x, residual)
        x = self.self_attn(x, angles, attention, kv_cache)
        self.post_attention_layernorm.add(x, residual)
        return self.mlp(x)


class LlamaModel(nn.Module):
    """Embedding, decoder layers, final norm."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: ModelConfig, *, max_model_len: int, prefix: str, options: _LayerOptions) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens", **options
        )
        self.rotary = make_rotary_embedding(config.rope, head_dim=config.head_dim, max_model_len=max_model_len)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, layer=layer, prefix=f"{prefix}.layers.{layer}", options=options)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=options["dtype"], ops=options["ops"])

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv_caches: KvCaches) -> Tensor:
        """Hot path: see `CausalLM.forward`."""
        residual = self.embed_tokens(token_ids)
        angles = self.rotary(positions, attention)
        x: Tensor = self.layers[0](None, residual, angles, attention, kv_caches[0])
        for layer, kv_cache in zip(self.layers[1:], kv_caches[1:], strict=True):
            x = layer(x, residual, angles, attention, kv_cache)
        self.norm.add(x, residual)
        return x


class LlamaForCausalLM(CausalLM):
    """The decoder with its head."""

    def __init__(
        self, config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, parallel: TensorParallel, ops: OpSettings
    ) -> None:
        super().__init__()
        self.config = config
        self._options: _LayerOptions = {"dtype": dtype, "ops": ops, "tp_rank": parallel.rank, "tp_size": parallel.size}
        self.model = LlamaModel(config, max_model_len=max_model_len, prefix="model", options=self._options)
        self.lm_head = self._make_head(self.model.embed_tokens if config.tie_word_embeddings else None)
        self.sample_tokens = SampleTokens(ops=ops) if ops.platform == "cuda" else None

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv_caches: KvCaches) -> Tensor:
        """Hot path: see `CausalLM.forward`."""
        return self.model(token_ids, positions, attention, kv_caches)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Hot path: see `CausalLM.compute_logits`."""
        return self.lm_head(hidden_states)

    def greedy(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hot path: see `CausalLM.greedy`."""
        return self.lm_head.greedy(hidden_states)

    def weights_read(self) -> Iterator[Tensor]:
        """Yields the parameters that every step reads as a whole; see `CausalLM.weights_read`."""
        yield from self.lm_head.parameters()
        for part in (self.model.layers, self.model.norm):
            yield from part.parameters()

    @property
    def has_tied_head(self) -> bool:
        """Whether the head shares the embedding's weight."""
        return self.lm_head.is_tied

    def untie_head(self) -> None:
        """Gives the head a weight of its own, not yet filled."""
        self.model.embed_tokens.store_for(None)
        self.lm_head = self._make_head(None)

    def _make_head(self, tied_to: VocabParallelEmbedding | None) -> ParallelLMHead:
        return ParallelLMHead(self.config.vocab_size, self.config.hidden_size, prefix="lm_head", tied_to=tied_to, **self._options)
