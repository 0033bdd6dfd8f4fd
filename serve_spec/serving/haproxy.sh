#!/bin/sh
# Run HAProxy with Ray Serve's arguments: -db -f CONFIG ...
#
# While CONFIG has no application, answer 503 `starting` in place of 404, for which Ray has no
# setting. proxy.py sets both variables; HAProxy reads the one in double quotes.
starting='return status 503 content-type application/json hdr Retry-After 5 string'
grep -q '^ *use_backend' "$3" ||
    sed -i "s|return status 404 .*|$starting \"\${SERVE_SPEC_STARTING}\"|" "$3"
exec "$SERVE_SPEC_HAPROXY" "$@"
