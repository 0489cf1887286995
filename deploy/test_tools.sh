#!/usr/bin/env bash
# Installs what the tests of deployment use beside Python, on Debian as root: nginx, Prometheus with promtool, Chromium.
# Without them those tests are skipped. What was installed is not started.
set -euo pipefail

missing=()
for pair in nginx:nginx-light promtool:prometheus chromium:chromium; do
  command -v "${pair%%:*}" >/dev/null || PATH=$PATH:/usr/sbin command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
[ ${#missing[@]} -gt 0 ] || exit 0

policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
once=(-o Acquire::Retries=0 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20) # no network is told soon
apt-get "${once[@]}" update -qq
DEBIAN_FRONTEND=noninteractive apt-get "${once[@]}" install -qq -y --no-install-recommends "${missing[@]}"
