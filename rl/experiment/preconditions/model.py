"""The model directory: an architecture that the trainer defines, whole weights that are not quantized, a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from numerics.errors import user_error
from numerics.spec import QuantSpec
from rl.experiment import Experiment
from trainer.hf_config import ModelShape, read_shape
from trainer.model_checks import check_layout, check_mode

WEIGHT_DTYPES = ("BF16", "F16", "F32")
"""safetensors' names of what is read; anything but BF16 is rounded to it."""


def read_model(path: str | Path, key: str = "model.path") -> ModelShape:
    """Read config.json of the Hugging Face directory `path` and look into its weights; messages speak of it as `key`.

    Raises:
        UserError: the directory, its config or its weights are missing, broken, quantized or of another architecture.
    """
    path = Path(path)
    if not path.is_dir():
        raise user_error(
            key,
            found=str(path),
            expected="an existing Hugging Face model directory",
            remedy="Correct the path; a relative one of a spec is looked up in the current directory, then beside "
            "the spec file. "
            "`python -m examples.tiny_model --out DIR` writes a small model.",
        )
    shape = read_shape(path, key)
    _check_weights(path, key)
    return shape


def check_model_layout(model: ModelShape, experiment: Experiment) -> None:
    """Whether the mode defines the model, and it splits into tp, pp, ep and dp parts of whole quantization blocks.

    Raises:
        UserError: no.
    """
    if experiment.trainer.pp > 1:
        raise user_error(
            "trainer.pp",
            found=experiment.trainer.pp,
            expected="1: pipeline parallelism is not in this release",
            remedy="Set trainer.pp=1 and use trainer.tp, trainer.ep or trainer.dp.",
        )
    if experiment.numerics.router_replay != "off" and not model.moe:
        raise user_error(
            "numerics.router_replay",
            found=experiment.numerics.router_replay,
            expected="off for a dense model, which has no experts",
            remedy="Set numerics.router_replay=off, or choose a mixture of experts.",
        )
    # A spec that one side quantizes by binds the other too: blocks are the same bytes on both.
    quant = experiment.numerics.quant_spec() if experiment.numerics.quantizes else QuantSpec.preset("bf16")
    check_mode(model, experiment.numerics.mode)
    check_layout(model, experiment.trainer, quant)


def _check_weights(path: Path, key: str) -> None:
    files = weight_files(path, key)
    if not files:
        raise user_error(
            key,
            found=f"{path} without *.safetensors",
            expected="safetensors weights",
            remedy="Convert the weights to safetensors; pickled weights are not read.",
        )
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                dtypes = {name: stored.get_slice(name).get_dtype() for name in stored.keys()}
        except (OSError, SafetensorError) as error:
            raise user_error(
                f"{key}: {file}", found=str(error), expected="a whole safetensors file", remedy="Copy the file again."
            ) from error
        for name, dtype in dtypes.items():
            if dtype not in WEIGHT_DTYPES:
                raise user_error(
                    f"{key}: {name} in {file}",
                    found=dtype,
                    expected=" or ".join(WEIGHT_DTYPES),
                    remedy="Use the BF16 checkpoint of this model.",
                )


def weight_files(path: Path, key: str) -> list[Path]:
    """The files that the index names, or all where there is none."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(path.glob("*.safetensors"))
    try:
        values: Any = json.loads(index.read_text(encoding="utf-8"))
        return sorted({path / name for name in values["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise user_error(
            f"{key}: {index}",
            found=f"{type(error).__name__}: {error}",
            expected="a JSON object with a weight_map of tensor to file",
            remedy="Restore the file.",
        ) from error
