"""Both ends of a decoder, which all architectures share: the embedding, the last norm, the head, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

from fp8rl.models.families import norm
from fp8rl.models.forms import ADD_NORM, EMBED, LINEAR, LOGPROBS
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import Location, TensorRow
from fp8rl.models.trace import TOKENS, Op

FIRST_OPS = (Op("embed", EMBED, (TOKENS,), ("x",), "model.embed_tokens", "embedding"),)
LAST_OPS = (
    Op("final_norm", ADD_NORM, ("x", "residual"), ("x", "residual"), "model.norm", "decoder.final_layernorm"),
    Op("lm_head", LINEAR, ("x",), ("logits",), "lm_head", "output_layer"),
    Op("logprobs", LOGPROBS, ("logits",), ("logprobs",)),
)


def first_tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield TensorRow(
        name="model.embed_tokens.weight",
        shape=(sizes.vocab_size, sizes.hidden_size),
        op="embed",
        engine=Location("model.embed_tokens.weight", padded=True, split=0),
        megatron=Location("embedding.word_embeddings.weight"),
        copies=("output_layer.weight",) if sizes.tied else (),
    )


def last_tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield norm("model.norm.weight", sizes.hidden_size, "final_norm", None, "decoder.final_layernorm.weight")
    if not sizes.tied:
        yield TensorRow(
            name="lm_head.weight",
            shape=(sizes.vocab_size, sizes.hidden_size),
            op="lm_head",
            product=True,
            engine=Location("lm_head.weight", padded=True, split=0),
            megatron=Location("output_layer.weight"),
        )
