#!/bin/sh
# The main job, end to end, with every command shown before it runs.
set -eu
out=${1:-demo-output}
mkdir -p "$out"

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

run trimmoe fetch
run trimmoe sample-text --part calibration -o "$out/calibration.txt"
run trimmoe sample-text --part held-out -o "$out/held-out.txt"
run trimmoe calibrate embedded --text "$out/calibration.txt" -o "$out/profile.trim"
run trimmoe plan "$out/profile.trim" clusters/testbed10.yaml -o "$out/plan.trim" \
    --explain --picture "$out/placement.png"
prompt="An operator is a symbol that tells the program to"
run trimmoe generate "$prompt" --profile "$out/profile.trim" --plan "$out/plan.trim" \
    --method exact --max-new-tokens 24
run trimmoe generate "$prompt" --profile "$out/profile.trim" --plan "$out/plan.trim" \
    --method trimmoe --budget 0.1 --max-new-tokens 24
run trimmoe compare --text "$out/held-out.txt" --profile "$out/profile.trim" \
    --plan "$out/plan.trim" --method pipeline --method edgeshard --method exact --method lossless \
    --method speculative --method trimmoe --budget 0.02 --budget 0.1 --json "$out/comparison.json" --picture "$out/layers.png"
printf '\nPictures and figures: %s/placement.png, %s/layers.png, %s/comparison.json\n' \
    "$out" "$out" "$out"
