"""The model's own log-probabilities of tokens, by its code in transformers, row by row, in FP32 and in BF16."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8rl.models.checkpoint.reading import weight_files
from fp8rl.models.checkpoint.stored import WeightFiles, is_scales
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.memory import give_back
from fp8rl.numerics.core.reading import check_regular, read_json
from fp8rl.numerics.ops import narrowed, truncation_floors
from fp8rl.numerics.sampling import EVERY_TOKEN, Truncation
from fp8rl.trainer import device
from fp8rl_certify.dump.rows import DumpRow, Sampling

_BLOCK_FP8 = "fp8"
Attention = Literal["eager"] | None
"""The attention of transformers. None: transformers chooses, and takes a fused kernel if it has one."""
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class ModelFacts:
    """Facts from a model's directory, for any architecture."""

    vocabulary: int
    """Number of ids for which the model has an embedding."""
    positions: int | None
    """Largest number of tokens of a row; None: the directory does not say."""
    bos: int | None
    """The id with which the model's texts begin, if any."""
    special: frozenset[int]
    """Ids of special tokens, which are no text."""


class Reference:
    """A model of transformers in one dtype. It computes the logits of one row at a time."""

    def __init__(self, path: Path, dtype: torch.dtype, attention: Attention = None) -> None:
        """Load the model. Raises UserError: transformers cannot load the directory."""
        self.model = _loaded(path, dtype, attention).to(device.claim(0)).eval()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return logits, FP32 [S - 1, V]. Row t belongs to the token after `tokens[t]`."""
        ids = torch.tensor([list(tokens)], device=device.current())
        logits: Tensor = self.model(ids, use_cache=False).logits[0, :-1].float()
        return logits


def logprobs(logits: Tensor, tokens: Tensor, sampling: Sampling, truncation: Truncation | None = None) -> Tensor:
    """Return log-probabilities of tokens [T] from logits [T, V] under their sampling: float64 [T] on the CPU.

    truncation: used in place of the sampling's truncation. A token that truncation leaves out has -inf.
    """
    every = _distributions(logits, sampling, truncation or sampling.truncation)
    return every.gather(-1, tokens.to(logits.device)[:, None]).squeeze(-1).cpu()


def entropies(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the entropy in nats of the distributions from logits [T, V] under a sampling: float64 [T] on the CPU."""
    return torch.special.entr(_distributions(logits, sampling, sampling.truncation).exp()).sum(-1).cpu()


def _distributions(logits: Tensor, sampling: Sampling, cut: Truncation) -> Tensor:
    if cut.cuts:
        each = logits.new_ones(len(logits))
        floors = truncation_floors(
            logits, each * sampling.divisor, each * cut.top_p, each.long() * cut.top_k, each * cut.min_p
        )
        logits = narrowed(logits, floors)
    return (logits.double() / sampling.divisor).log_softmax(-1)


def scored(
    path: Path,
    dtype: torch.dtype,
    rows: Sequence[DumpRow],
    samplings: Sequence[Sampling],
    look: Callable[[Reference, int, Tensor], None] | None = None,
    attention: Attention = None,
) -> dict[int, Tensor]:
    """Return by row float64 [T], the log-probabilities of each answer's T tokens.

    look: called for each row with the model, the row's number and its logits [S - 1, V].
    """
    model = Reference(path, dtype, attention)
    found = {}
    for number, (row, sampling) in enumerate(zip(rows, samplings, strict=True)):
        logits = model.logits(row.tokens)
        if look is not None:
            look(model, number, logits)
        found[number] = logprobs(logits[row.prompt_length - 1 :], answer(row), sampling)
    del model, logits
    give_back()
    return found


def answer(row: DumpRow) -> Tensor:
    """Return the answer's tokens, int64 [T]."""
    return torch.tensor(row.tokens[row.prompt_length :])


def untruncated(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return `logprobs` without truncation."""
    return logprobs(logits, tokens, Sampling(temperature), EVERY_TOKEN)


def facts(path: Path) -> ModelFacts:
    """Read `config.json` and the tokenizer's files.

    Raises:
        UserError: the directory has no model that transformers knows.
    """
    from transformers import AutoConfig

    key = "--model"
    if not (path / "config.json").is_file():
        raise user_error(
            key,
            found=f"{path} without config.json",
            expected="the Hugging Face directory of the model that the dump is from",
            remedy="Give it with --model DIR.",
        )
    check_regular(path, key)
    read_json(path / "config.json", key, "a Hugging Face config.json")
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(path, **_LOCAL)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unknown(path, error) from None
    text = config.get_text_config()
    ends = [getattr(each, name, None) for each in (config, text) for name in ("bos_token_id", "eos_token_id")]
    ids = [one for each in ends for one in (each if isinstance(each, list) else [each]) if isinstance(one, int)]
    bos = getattr(text, "bos_token_id", None)
    return ModelFacts(
        vocabulary=int(text.vocab_size),
        positions=getattr(text, "max_position_embeddings", None),
        bos=bos if isinstance(bos, int) else None,
        special=frozenset(ids) | _added(path),
    )


def _added(path: Path) -> frozenset[int]:
    """Return the ids of tokens that tokenizer.json calls special."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return frozenset()
    added = read_json(file, "--model", "a tokenizer").get("added_tokens") or []
    return frozenset(each["id"] for each in added if isinstance(each, dict) and each.get("special"))


def _loaded(path: Path, dtype: torch.dtype, attention: Attention) -> Any:
    """Load the model of a directory. FP8 weights with a scale for each block are dequantized first."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    files = weight_files(path, "--model")
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(path, attn_implementation=attention, **_LOCAL)
            quantization = getattr(config, "quantization_config", None)
            if quantization is None:
                return AutoModelForCausalLM.from_pretrained(
                    path, config=config, dtype=dtype, use_safetensors=True, **_LOCAL
                )
            if quantization.get("quant_method") != _BLOCK_FP8 or not quantization.get("weight_block_size"):
                raise user_error(
                    f"--model: quantization_config in {path}",
                    found=json.dumps(quantization, default=str),
                    expected="weights in BF16, or in FP8 with a scale for each block",
                    remedy="Give the BF16 checkpoint of this model.",
                )
            del config.quantization_config
            stored = WeightFiles(files, "--model")
            state = {name: stored.read(name) for name in stored.where if not is_scales(name, stored)}
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            return model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise _unknown(path, error) from None


def _unknown(path: Path, error: Exception) -> UserError:
    return user_error(
        "--model",
        found=f"{path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        expected="a model that transformers can load without code from its directory",
        remedy="Give the Hugging Face directory of the model that the dump is from.",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars and warnings of transformers, but not its errors."""
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity()
    theirs.set_verbosity(logging.ERROR)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(before)
        theirs.enable_progress_bar()
