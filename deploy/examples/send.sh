#!/bin/sh
# Writes one event with curl, which repeats a request by itself.
#
#     FENCEPOST_URL=http://127.0.0.1:8000 deploy/examples/send.sh order-1 [TOPIC]
#
# --retry: after 408, 429, 500, 502, 503 and 504, not before the time in Retry-After. --retry-all-errors: also after a
# connection that breaks, when the event may be written: with its key this is harmless. Other answers (4xx) are final.
# Prefer: wait: a repetition that overtakes its first attempt waits for it; its 409 would be final for curl.
set -eu
key=$1 topic=${2:-demo}
answer=$(mktemp)
trap 'rm -f "$answer"' EXIT
status=$(curl --silent --show-error --output "$answer" --write-out '%{http_code}' \
  --retry 8 --retry-all-errors --retry-max-time 60 --max-time 15 \
  --header "Idempotency-Key: $key" --header 'Prefer: wait=5' --header 'Content-Type: application/json' \
  --data "{\"topic\": \"$topic\", \"key\": \"$key\", \"value\": {\"order\": \"$key\", \"total\": 12.5}}" \
  "$FENCEPOST_URL/events")
echo "$status $(cat "$answer")"
[ "$status" = 201 ]
