#!/bin/bash
# Call 2 of two, at most 380 s: engines against the trainer, paths that never ran, rates of engines, a resume, the demo.
# In the repository's root, with the folder .fifteen/2 carried: OUT=FOLDER bash lab/bench/gpu/fifteen/call2.sh [--rehearse]
LONGEST=380
. "$(dirname "${BASH_SOURCE[0]}")/common.sh" 2 "$@"
RUNS=$ROOM/runs
small=()
[ -n "$REHEARSE" ] && small=(rollout.prompts_per_step=4 rollout.group_size=2 eval.problems=8)
# short NAME SPEC ARGUMENT...: a run of two steps; its log becomes a piece of $OUT/runs.log.
short() {
    local name=$1 spec=$2 code
    timeout -k 5 "$(left $((110 * SLOWER)))" python3 -c 'from fp8rl.cli import main; main()' train "examples/$spec.yaml" \
        run.dir="$RUNS" run.name="$name" run.steps=2 tracking.wandb.mode=disabled rollout.max_total_tokens=8192 \
        "${small[@]}" "${@:3}" >> "$RUNS/$name.log" 2>&1
    code=$?
    say "run $name ${*:3}: exit code $code"
    return $code
}
mkdir -p "$RUNS"
part 130 engine
# beside NAME SPEC ARGUMENT...: the same beside the others; in a rehearsal, on two cores, before the next.
beside() {
    short "$@" &
    [ -z "$REHEARSE" ] || wait
}
beside latent arithmetic_deepseek
beside linear arithmetic_qwen3_5
beside adapters arithmetic_lora
beside shared_base arithmetic_lora sync.shared_base=true
beside sleep arithmetic rollout.sleep=true
beside offload arithmetic trainer.optimizer.offload=true
beside kv8 arithmetic numerics.kv=fp8
wait
part 90 rollout
short resumed arithmetic run.steps=1 && short resumed arithmetic run.steps=2 --resume
part 60 demo
for log in "$RUNS"/*.log; do echo "== $(basename "$log")"; tail -n 40 "$log"; done > "$OUT/runs.log"
grep -hE "d = 0|d == 0|rror" "$OUT/runs.log" | tail -n 40
tail -c 2500 "$OUT/parts.log"
say end
