#!/usr/bin/env bash
# One node of a Ray cluster that lives as long as one run:
#
#   examples/launch/node.sh RANK NODES HEAD SPEC [KEY=VALUE]...
#
# RANK 0 starts Ray's head at the address HEAD, waits until all NODES are there, and submits the run; its exit code is
# the run's. The other ranks join, and stay until the head is gone. `fp8rl` and `ray` are found by PATH. All nodes see
# the directory that this is called in, the model, and the token of RAY_AUTH_TOKEN_PATH (docs/cluster.md).
# At the end it ends only the processes that it has started.
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "found $# arguments, expected at least 4: RANK NODES HEAD SPEC [KEY=VALUE]..." >&2
    exit 2
fi
rank=$1 nodes=$2 head=$3
shift 3
port=${RAY_HEAD_PORT:-6379} dashboard=${RAY_DASHBOARD_PORT:-8265}
patience=${FP8RL_JOIN_SECONDS:-600}

end_ray() {
    kill "$ray" 2> /dev/null || true
    wait "$ray" 2> /dev/null || true
}

if [ "$rank" -ne 0 ]; then
    until ray health-check --address "$head:$port" 2> /dev/null; do
        if [ "$SECONDS" -ge "$patience" ]; then
            echo "found no head at $head:$port within $patience s, expected rank 0 to start one. See its output." >&2
            exit 1
        fi
        sleep 2
    done
    ray start --address "$head:$port" --block &
    ray=$!
    trap end_ray EXIT
    while ray health-check --address "$head:$port" 2> /dev/null; do sleep 10; done
    exit 0
fi

ray start --head --node-ip-address "$head" --port "$port" --dashboard-port "$dashboard" --block &
ray=$!
trap end_ray EXIT
python - "$head:$port" "$nodes" "$patience" << 'END'
import sys
import time

import ray

address, wanted, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
began, found = time.monotonic(), 0
while found < wanted:
    if time.monotonic() - began > patience:
        sys.exit(f"found {found} nodes within {patience:g} s, expected {wanted}. See what the other ranks have said.")
    time.sleep(1)
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError:  # it is coming up
        continue
    found = sum(node["Alive"] for node in ray.nodes())
    ray.shutdown()
END
fp8rl submit "$@" --address "http://127.0.0.1:$dashboard" --wait
