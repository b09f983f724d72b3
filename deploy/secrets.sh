#!/bin/sh
# Prints random passwords and tokens for deploy/compose.yaml:  deploy/secrets.sh > deploy/.env
set -eu
# The shell has made the file before this script could set a umask.
if [ -f /dev/stdout ]; then chmod 600 /dev/stdout; fi
for name in REDIS_PASSWORD CHECKPOINT_SECRET GATEWAY_TOKEN GRAFANA_PASSWORD; do
  printf '%s=%s\n' "$name" "$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"
done
