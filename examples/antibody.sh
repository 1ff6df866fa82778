#!/usr/bin/env bash
# Antibody chains from a pretrained model, from nothing to FASTA: fetch, label, train, decode. With 24 states it takes a good two
# minutes of one core. Needs pip install 'mdmi-fast[protein]', a package index, and apt-get of Debian or Ubuntu.
#
# usage: examples/antibody.sh FOLDER [STATES]
set -euo pipefail
mkdir -p "$1" && cd "$1"
states=${2:-24}
model='sapiens:heavy?batch_invariant=false' # faster; decoded below without it, so that no batch changes an answer

mdmi-fast models fetch sapiens
mdmi-fast label --model "$model" --states "$states" --shard-size 10 --out labels
mdmi-fast train --model "$model" --labels labels --combine interaction --layers 128,64 --marginals summary --epochs 40 \
    --patience 40 --lr 0.003 --batch-size 4 --held-out 0.2
python -m mdmi_fast.tasks.protein prompts --task infill --count 20 --out prompts.jsonl
mdmi-fast decode --model sapiens:heavy --data prompts.jsonl --policy mi-budget:0.3,entropy_weight=0 --temperature 1 \
    --out decoded.jsonl
python -m mdmi_fast.tasks.protein fasta decoded.jsonl > decoded.fasta
