#!/bin/sh
# Run HAProxy with Ray Serve's arguments: -db -f CONFIG ...
#
# Until CONFIG has had an application, answer 503 `starting` instead of Ray's 404, which no setting
# changes. proxy.py sets both variables; HAProxy reads the one in double quotes.
starting='return status 503 content-type application/json hdr Retry-After 5 string'
if grep -q '^ *use_backend' "$3"; then
    : > "$3.$PPID"
elif [ ! -e "$3.$PPID" ]; then
    sed -i "s|return status 404 .*|$starting \"\${SERVE_SPEC_STARTING}\"|" "$3"
fi
exec "$SERVE_SPEC_HAPROXY" "$@"
