#!/bin/sh
# Ray Serve runs this in place of HAProxy's binary; it must be an executable file.
exec "${SERVE_SPEC_PYTHON:-python3}" -I "$(dirname "$(readlink -f "$0")")/proxy/run_haproxy.py" "$@"
