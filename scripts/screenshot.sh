#!/usr/bin/env bash
# Takes a picture of the top of a report's page with a headless Chromium.
#
#     scripts/screenshot.sh REPORT/index.html FILE.png [WIDTH,HEIGHT]
set -euo pipefail
page=$(realpath "$1") file=$(realpath -m "$2") size=${3:-1280,900}
for browser in chromium chromium-browser google-chrome; do
  if command -v "$browser" >/dev/null; then break; fi
done
"$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$(mktemp -d)" \
  --window-size="$size" --screenshot="$file" "file://$page" 2>/dev/null
