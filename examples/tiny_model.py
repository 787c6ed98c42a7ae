"""Write a small random model as a Hugging Face directory: `python -m examples.tiny_model --out DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

from fp8rl import TinyModel, UserError, write_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.tiny_model", description="Write a small random model.")
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument("--family", choices=TinyModel.families(), default=TinyModel.family)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=TinyModel.layers)
    parser.add_argument("--hidden", type=int, default=TinyModel.hidden)
    parser.add_argument("--heads", type=int, default=TinyModel.heads)
    parser.add_argument("--kv-heads", type=int, default=TinyModel.kv_heads)
    parser.add_argument("--head-dim", type=int, default=TinyModel.head_dim)
    parser.add_argument("--intermediate", type=int, default=TinyModel.intermediate, help="width of an expert or MLP")
    parser.add_argument("--experts", type=int, default=TinyModel.experts)
    parser.add_argument("--top-k", type=int, default=TinyModel.top_k)
    parser.add_argument("--vocab", type=int, default=TinyModel.vocab)
    parser.add_argument("--max-positions", type=int, default=TinyModel.max_positions)
    parser.add_argument("--dense", action="store_true", help="a dense Qwen3 instead of a mixture of experts")
    parser.add_argument("--yarn", action="store_true", help="a DeepSeek-V3 whose context YaRN lengthened")
    values = vars(parser.parse_args())
    out, seed = values.pop("out"), values.pop("seed")
    if values.pop("dense"):
        values["experts"] = 0
    try:
        write_tiny_model(out, TinyModel(**values), seed)
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
