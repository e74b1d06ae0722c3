#!/usr/bin/env bash
# The life of a small Kimi K3, step by step: what `k3 quickstart` does in one command.
#   bash runs/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
K3=${K3:-.venv/bin/k3}
STEPS=${STEPS:-880}      # 1,024 tokens a step; 3,000 tokens/s on 2 CPU cores: 880 steps are 5 minutes
CORPUS_MB=${CORPUS_MB:-10}
OUT=${OUT:-runs/by-hand}
RECIPE=${RECIPE:-recipes/quickstart.toml}

# 1. Text. Python sources and their documentation are on every machine that can run this; about 3 bytes
#    are a token at a vocabulary of 1,536, so 880 x 1,024 tokens read 2.7 MB and nothing is read twice.
$K3 data build --local-corpus "$CORPUS_MB" --vocab-size "${VOCAB:-1536}" --held-out 0.03 --out "$OUT/data"
$K3 data info "$OUT/data"

# 2. A model. nano: 128 wide, 5 layers (3 KDA, 2 MLA), 16 experts of which 4 work on a token:
#    2.1M parameters, 1.35M of them activated.
$K3 inspect nano

# 3. Training. Kill it at any moment; the same line with --resume auto ends in the same weights, bit for bit.
$K3 pretrain "$RECIPE" --data.train "$OUT/data" --train.steps "$STEPS" --run.folder "$OUT/run" --resume auto

# 4. What it learned, in pictures and in its own words.
$K3 report "$OUT/run"
$K3 inspect "$OUT/run"
$K3 generate "$OUT/run" "def " --max-tokens "${SAMPLE:-64}"

# 5. The same model in the published layout, as any tool for Kimi K3 reads it.
$K3 convert "$OUT/run" "$OUT/hf" --verify
$K3 inspect "$OUT/hf"
