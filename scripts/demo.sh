#!/bin/sh
# The main job, end to end, with the command shown before it runs.
set -eu
out=${1:-demo-output}
printf '\n$ trimmoe demo --output %s\n' "$out"
trimmoe demo --output "$out"
printf '\nProfile, plan and a picture of it: %s/profile.trim, plan.trim, placement.png\n' "$out"
