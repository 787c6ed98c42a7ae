"""The model class that SGLang runs in exact mode, for every architecture. It runs the program of `models`.

SGLang's scheduler, pools, CUDA graphs and sampler stay. Of its model classes and layers only the logits processor is
used. It chooses the rows whose logits are computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8rl.models import read_model
from fp8rl.models.lowering import lowered
from fp8rl.models.program import LOGITS, TOKENS, run
from fp8rl.models.tensors import EngineRank
from fp8rl.rollout.engine.plugin.host import EngineHost
from fp8rl.rollout.engine.plugin.state import state
from fp8rl.rollout.engine.plugin.tokens import Paged


class ProgramModel(EngineHost):
    """The model of a rank. SGLang makes it, loads its weights and runs it."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        from sglang.srt.runtime_context import get_parallel, get_server_args

        current, parallel = state(), get_parallel()
        definition = read_model(Path(get_server_args().model_path), served=True).adapted(current.adapter)
        super().__init__(definition, current.numerics, EngineRank(parallel.tp_rank, parallel.tp_size))
        self.config = config
        *self._body, self._head, _ = lowered(definition, self.spec).sites()
        self.logits_processor = _logits_processor(config)

    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, input_embeds: None = None, **unused: Any
    ) -> Any:
        self.tokens, x = Paged.of(forward_batch), self.tensor(self._body[0])[:0]
        if len(input_ids):
            x = run(self._body, self, {TOKENS: input_ids})["x"]
        return self.logits_processor(input_ids, x, self, forward_batch)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the rows that SGLang's processor chose."""
        return run((self._head,), self, {"x": x})[LOGITS]  # type: ignore[no-any-return]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors of a model directory into the parameters. Later loads go to `ServedWeights.load`."""
        table, parameters = self.definition.tensors, dict(self.named_parameters())
        views = table.views(parameters, self.spec.weight.block_rows, self.rank)
        for name, tensor in weights:
            if (row := table.get(name)) is not None and (view := views.get(self.rank.label(name, row))) is not None:
                view.copy_(self.rank.part(row, tensor).view_as(view))


def _logits_processor(config: Any) -> Any:
    from sglang.srt.layers.logits_processor import LogitsProcessor

    class Logits(LogitsProcessor):  # type: ignore[misc]
        def _compute_lm_head(self, hidden_states: Tensor, lm_head: Any, embedding_bias: Any = None) -> Tensor:
            return lm_head.logits(hidden_states)  # type: ignore[no-any-return]

    return Logits(config)


def program_of_any_architecture(model_config: Any) -> tuple[type, str]:
    """Replaces `get_model_architecture`: return `ProgramModel` as the class of every model, and the model's name."""
    from sglang.srt.configs.model_config import ModelImpl

    name = model_config.hf_config.architectures[0]
    model_config._resolved_model_arch, model_config._resolved_model_impl = name, ModelImpl.SGLANG
    return ProgramModel, name
