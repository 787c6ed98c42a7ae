"""Write a small random model as a Hugging Face directory: `python -m tests.support.tiny_model --out DIR`.

Every quantized matrix is aligned to the 128 x 128 blocks. The tokenizer is character level: printable ASCII, newline
and six special tokens in the first 102 ids, the rest of the vocabulary unused. A chat renders as
`<|user|>Q<|assistant|>`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_architectures import OWN, tiny

if TYPE_CHECKING:  # seconds of imports
    from transformers import PreTrainedModel

SPECIAL = ("<|pad|>", "<|endoftext|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))
_BYTE_LEVEL = {" ": "Ġ", "\n": "Ċ"}
"""How byte-level vocabularies spell characters that are not their own spelling."""
PAD, EOS = SPECIAL.index("<|pad|>"), SPECIAL.index("<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class TinyModel:
    """Dimensions; `experts = 0` gives a dense model, `intermediate` is the width of each expert or of the dense MLP."""

    layers: int = 2
    hidden: int = 128
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 128
    intermediate: int = 128
    experts: int = 8
    top_k: int = 2
    vocab: int = 128
    max_positions: int = 2048
    tied: bool = False
    """The output projection is the embedding."""
    renormalize: bool = True
    """The chosen experts' probabilities are divided by their sum."""
    family: str = "qwen3"
    """Qwen2, Llama, Mistral and Qwen3.5's `qwen3_5_text` are dense, whatever `experts` says. OLMoE needs as many
    key-value heads as heads, `hidden` wide together. In DeepSeek-V3 `head_dim` is the part of a head that is not
    rotated, and the width of a value."""
    groups: int = 4
    """Groups of a sigmoid router's experts, of which a token may go to half; 1 as in Kimi-K2."""
    q_rank: int = 128
    """The narrow row of DeepSeek-V3's queries; 0: none, as in Moonlight."""
    yarn: bool = False
    """DeepSeek-V3's context was lengthened by YaRN."""

    @staticmethod
    def families() -> list[str]:
        """Return the values that `family` may have."""
        return sorted(OWN.keys() - {"qwen3_moe"})

    @property
    def moe(self) -> bool:
        return self.experts > 0 and self.family not in ("qwen2", "qwen3_5_text", "llama", "mistral")


def write_tiny_model(out: Path, shape: TinyModel = TinyModel(), seed: int = 0) -> None:
    """Write config, BF16 safetensors and tokenizer to the new directory `out`; appears whole or not at all."""
    if out.exists():
        raise FileExistsError(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model = build_model(shape, seed)
        _in_bf16(model).save_pretrained(temporary)
        _tokenizer(shape).save_pretrained(temporary)
        _add_older_spellings(temporary, shape)
        temporary.chmod(0o755)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def build_model(shape: TinyModel, seed: int) -> PreTrainedModel:
    """The model with random FP32 weights; the global generator is left as it was."""
    common: dict[str, Any] = {
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions, "rms_norm_eps": 1e-6, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}, "tie_word_embeddings": shape.tied,
        "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny("qwen3_moe" if shape.family == "qwen3" and shape.experts else shape.family, shape, common)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = PAD
    return model


def _in_bf16(model: PreTrainedModel) -> PreTrainedModel:
    """All but the experts' biases, which checkpoints have in FP32."""
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    model.to(torch.bfloat16)
    for name, bias in biases.items():
        model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = bias.float()
    return model


def _tokenizer(shape: TinyModel) -> PreTrainedTokenizerFast:
    tokens = [*SPECIAL, *CHARACTERS]
    tokens += [f"<|extra_{index}|>" for index in range(shape.vocab - len(tokens))]
    if shape.family == "qwen2":  # transformers has a class for it, which reads any file as byte-level pieces
        vocabulary = {_BYTE_LEVEL.get(token, token): index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    else:
        vocabulary = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|extra_0|>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    named = {"pad_token": "<|pad|>", "eos_token": "<|im_end|>", "unk_token": "<|extra_0|>"}
    sizes = {"clean_up_tokenization_spaces": False, "model_max_length": shape.max_positions}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **sizes)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _add_older_spellings(path: Path, shape: TinyModel) -> None:
    """transformers 5 renames keys that transformers 4 and serving engines read: write both spellings."""
    config = {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"}
    if shape.moe:
        config["num_experts"] = config["num_local_experts"] = shape.experts
    _update_json(path / "config.json", config)
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    _update_json(path / "tokenizer_config.json", fast)


def _update_json(path: Path, changes: dict[str, Any]) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    values.pop("backend", None)
    path.write_text(json.dumps(values | changes, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.tiny_model", description=write_tiny_model.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=TinyModel.families(), default=TinyModel.family)
    for field in dataclasses.fields(TinyModel):
        if field.type == "int":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    values = vars(parser.parse_args())
    write_tiny_model(values.pop("out"), seed=values.pop("seed"), shape=TinyModel(**values))


if __name__ == "__main__":
    main()
