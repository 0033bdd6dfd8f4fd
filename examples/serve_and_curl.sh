#!/bin/sh
# Start a server, ask it with curl, and stop it: sh examples/serve_and_curl.sh [MODEL]
set -eu
MODEL=${1:-asset:tiny}
PORT=${PORT:-8000}
URL=http://127.0.0.1:$PORT

serve-spec serve "$MODEL" --port "$PORT" >serve.log 2>&1 &
SERVER=$!
trap 'kill -TERM $SERVER 2>/dev/null; wait $SERVER || true' EXIT

# 503 until the model is loaded, nothing before the proxy is up.
until curl -sf "$URL/health" >/dev/null; do
    kill -0 $SERVER || { cat serve.log; exit 1; }
    sleep 1
done

curl -sf "$URL/v1/models"
echo
curl -sf "$URL/v1/completions" -H 'content-type: application/json' \
    -d '{"prompt": "def fibonacci(n):", "max_tokens": 48, "temperature": 0}'
echo
# A stream: one event for every round of the engine, with all the tokens that it gave.
curl -sfN "$URL/v1/completions" -H 'content-type: application/json' \
    -d '{"prompt": "class Stack:", "max_tokens": 48, "temperature": 0, "stream": true}'
