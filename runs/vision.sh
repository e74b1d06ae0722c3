#!/usr/bin/env bash
# A small Kimi K3 learns to see: drawn pictures, a caption each, a tenth of them held out.
#   bash runs/vision.sh
set -euo pipefail
cd "$(dirname "$0")/.."
K3=${K3:-.venv/bin/k3}
COUNT=${COUNT:-16000}    # 14,400 to learn from, 1,600 to be asked about
STEPS=${STEPS:-1500}     # 64 pictures a step: each is seen six or seven times; 7 minutes of one core
OUT=${OUT:-runs/vision-by-hand}

# 1. Pictures: shapes ("a large red ring on grey") and digits ("digits 4 7"), 24 to 32 pixels a side.
$K3 data draw "$OUT/drawings" --count "$COUNT"
$K3 data build "$OUT/drawings/captions.jsonl" --pictures --patch-size 4 --vocab-size 1536 --held-out 0.1 \
  --out "$OUT/pictures"

# 2. Tower, projector and text model together. The last lines say how many of the held-out pictures
#    it reads without a mistake.
$K3 pretrain recipes/vision.toml --data.train "$OUT/pictures" --train.steps "$STEPS" --run.folder "$OUT/run" \
  --run.threads "${THREADS:-1}"

# 3. One of them, in its own words.
$K3 generate "$OUT/run" --image "$OUT/drawings/000007.png" --temperature 0
