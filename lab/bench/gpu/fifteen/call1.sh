#!/bin/bash
# Call 1 of two, at most 340 s: kernels, the bits of libraries, rates, the trainer with TransformerEngine.
# In the repository's root, with the folder .fifteen/1 carried: OUT=FOLDER bash lab/bench/gpu/fifteen/call1.sh [--rehearse]
LONGEST=340
. "$(dirname "${BASH_SOURCE[0]}")/common.sh" 1 "$@"
python3 -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.is_available() and torch.cuda.get_device_name())'
python3 -c 'import torch, transformer_engine.pytorch as te; print("TransformerEngine", te.__file__)' 2>> "$OUT/parts.log" || say "TransformerEngine does not load: native sides are left out"
# Where it is installed, Megatron takes its optimizer, which needs a GPU.
[ -n "$REHEARSE" ] && rm -rf "$ROOM"/site/transformer_engine*
# DeepGEMM's kernels are compiled by nvcc, for each shape, while the first parts take one of the cores.
warm=
if [ -z "$REHEARSE" ]; then
    timeout 110 python3 -m lab.bench.gpu --out "$ROOM/compiles" bits deepgemm > "$OUT/deepgemm.log" 2>&1 &
    warm=$!
fi
part 60 exactness
part 50 graph
[ -n "$warm" ] && { wait "$warm"; say "DeepGEMM compiled: exit code $?"; }
part 50 bits deepgemm
part 70 gemms grouped quantizers vocabulary sync launch
part 90 steps stack
timeout "$(left $((30 * SLOWER)))" python3 -m pytest -q -p no:cacheprovider tests/numerics/test_cuda.py ${REHEARSE:+--collect-only} > "$OUT/tests.log" 2>&1
say "tests: exit code $?"
part 50 candidates
part 30 trees
tail -c 2500 "$OUT/parts.log"
tail -n 5 "$OUT/tests.log"
say end
