#!/bin/sh
# Prints random passwords and tokens for deploy/compose.yaml:  deploy/secrets.sh > deploy/.env
set -eu
umask 077
for name in REDIS_PASSWORD CHECKPOINT_SECRET GATEWAY_TOKEN GRAFANA_PASSWORD; do
  printf '%s=%s\n' "$name" "$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"
done
