# What both calls share; they source it with the call's number and their own arguments.
# It unpacks .fifteen/N into a site of its own and gives `part`, `say` and `left`. Results are files in $OUT.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." || exit 2
N=$1 REHEARSE=
[ "${2:-}" = --rehearse ] && REHEARSE=--rehearse
[ -d ".fifteen/$N" ] || { echo "found no folder .fifteen/$N, expected what lab.bench.gpu.fifteen.pack lays there" >&2; exit 2; }
: "${OUT:?names a folder for results}"
ROOM=${ROOM:-/opt/fp8rl-fifteen} BEGAN=$SECONDS
SLOWER=1
[ -n "$REHEARSE" ] && SLOWER=10
export TRITON_CACHE_DIR=$ROOM/kernels DG_JIT_CACHE_DIR=$ROOM/deepgemm PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export SGLANG_IS_FLASHINFER_AVAILABLE=false TOKENIZERS_PARALLELISM=false
say() { echo "$((SECONDS - BEGAN)) s  $*"; }
left() { local most=$((LONGEST * SLOWER - SECONDS + BEGAN)); [ "$1" -lt "$most" ] && echo "$1" || echo $((most > 1 ? most : 1)); }

mkdir -p "$OUT" "$ROOM/site" "$TRITON_CACHE_DIR"
for archive in ".fifteen/$N"/*.tar.xz; do
    into=$ROOM/site
    [ "$(basename "$archive")" = kernels.tar.xz ] && into=$TRITON_CACHE_DIR
    tar -xJf "$archive" -C "$into" --no-same-owner &
done
wait
# Triton writes whole paths into the lists of a kernel's files.
find "$TRITON_CACHE_DIR" -name '__grp__*.json' -exec sed -i "s#@CACHE@#$TRITON_CACHE_DIR#g" {} +
export PYTHONPATH=$PWD/.fifteen/$N/stand_ins:$ROOM/site:$PWD
# Without a GPU SGLang's engine is that for CPUs.
[ -n "$REHEARSE" ] && export PYTHONPATH=$PWD/requirements/cpu_stubs/src:$PYTHONPATH CUDA_VISIBLE_DEVICES=
say unpacked

# part LIMIT NAME...: parts of the bench, ended together after LIMIT seconds. Rows are in $OUT/gpu.jsonl as they come.
part() {
    local limit
    limit=$(left $(($1 * SLOWER)))
    timeout -k 5 "$limit" python3 -m lab.bench.gpu $REHEARSE --out "$OUT" "${@:2}" >> "$OUT/parts.log" 2>&1
    say "${*:2}: exit code $?"
}
