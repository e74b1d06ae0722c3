#!/usr/bin/env bash
# Many processes, one run: experts divided over four processes and ZeRO-3 on any CPU, held against one process.
#   bash runs/parallel_cpu.sh        about 5 minutes on 2 cores
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-runs/parallel-cpu}
export OMP_NUM_THREADS=1
export PYTHONPATH="${PYTHONPATH:-src}"

# 1. Text, and the run that all others are held against: the first 30 steps of nano in float32. A step has 4 rows of 256
#    tokens, because four processes take one each.
[ -d "$OUT/data" ] || $PYTHON -m openk3 data build --local-corpus "${CORPUS_MB:-3}" --vocab-size 1536 --out "$OUT/data"
recipe=(recipes/nano.toml --data.train "$OUT/data" --data.sequence_tokens 256 --train.batch_sequences 4
  --run.device cpu --run.observe_every 1 --run.eval_every 0 --run.checkpoint_every 10 --resume auto)
$PYTHON -m openk3 pretrain "${recipe[@]}" --run.folder "$OUT/one" --run.stop_after 30

# 2. The same run on four processes. nano has 16 experts: expert = 4 gives each process four of them, and tokens travel.
#    zero = 3 cuts everything else by rows over the four, and a layer is gathered only while it runs.
launch="$PYTHON -m torch.distributed.run --standalone --nproc-per-node 4"
$launch -m openk3 pretrain "${recipe[@]}" --run.folder "$OUT/four" \
  --parallel.zero 3 --parallel.expert 4 --run.stop_after 20

# 3. On with experts over two: each pair of processes shares the state of eight experts, and the checkpoint of step 20
#    is read by rows. In step 24 or a little later one process is killed; torchrun starts all again, and they go on by
#    themselves from the last checkpoint.
$launch --max-restarts 1 -m openk3 pretrain "${recipe[@]}" --run.folder "$OUT/four" \
  --parallel.zero 1 --parallel.expert 2 --run.checkpoint_every 2 --run.stop_after 30 &
launcher=$!
until grep -q '"step": *24' "$OUT/four/metrics.jsonl"; do
  kill -0 $launcher || break
  sleep 0.2
done
kill -9 "$(pgrep -P $launcher | tail -n 1)" || echo "the run was over before a process could be killed"
wait $launcher

# 4. Every step's loss, side by side. Float32 sums in another order differ in the last bits, so 1e-4 is asked for; where a
#    token's two best experts tie, such a bit sends it elsewhere: expert loads that differ show it.
$PYTHON - "$OUT/one" "$OUT/four" <<'END'
import sys
from openk3.obs import read_rows

one, four = ([*read_rows(f"{folder}/metrics.jsonl")] for folder in sys.argv[1:])
losses = [{r["step"]: r["loss"] for r in rows if r["kind"] == "step"} for rows in (one, four)]
loads = [{(r["step"], r["layer"]): r["load"] for r in rows if r["kind"] == "balance"} for rows in (one, four)]
resumed = [r["step"] for r in read_rows(f"{sys.argv[2]}/metrics.jsonl", superseded=True) if r["kind"] == "resume"]
assert losses[0].keys() == losses[1].keys() == set(range(1, 31)), "a step is missing"
worst = 0.0
for step, a in losses[0].items():
    b, moved = losses[1][step], 0
    for key, load in loads[0].items():
        if key[0] == step and key in loads[1]:
            moved += sum(abs(x - y) for x, y in zip(load, loads[1][key])) // 2
    worst = max(worst, abs(a - b) / a)
    print(f"step {step:2}  one process {a:.6f}  four {b:.6f}  relative {abs(a - b) / a:.1e}  choices moved {moved}")
    assert step > 20 or abs(a - b) / a < 1e-4, f"step {step} is off"
print(f"largest difference {worst:.1e}; the four went on from steps {resumed}")
END

# 5. What the four wrote together, as one model folder in the published layout; the logits of both agree.
$PYTHON -m openk3 convert "$OUT/four" "$OUT/hf" --verify
