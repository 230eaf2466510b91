#!/bin/sh
# Makes src/trimmoe/api/page/vendor/ anew: Preact with its hooks and htm, from npm, as one file.
# Versions are said here and nowhere else. Needs npm; nothing of it is needed to run or test TrimMoE.
set -eu
PREACT=11.2.0
HTM=3.1.1
ESBUILD=0.28.2
vendor=$(cd "$(dirname "$0")/../src/trimmoe/api/page/vendor" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm init --yes >/dev/null
npm install --silent --ignore-scripts "preact@$PREACT" "htm@$HTM" "esbuild@$ESBUILD"
cat >entry.js <<'ENTRY'
import htm from "htm";
import { h } from "preact";
export { render } from "preact";
export { useEffect, useMemo, useRef, useState } from "preact/hooks";
export const html = htm.bind(h);
ENTRY
banner="/*! preact $PREACT (MIT) and htm $HTM (Apache-2.0), see preact.LICENSE and htm.LICENSE */"
node_modules/.bin/esbuild entry.js --bundle --minify --format=iife --global-name=toolkit \
    --target=es2022 --banner:js="$banner" --outfile="$vendor/toolkit.js"
cp node_modules/preact/LICENSE "$vendor/preact.LICENSE"
cp node_modules/htm/LICENSE "$vendor/htm.LICENSE"
