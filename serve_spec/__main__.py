"""`python -m serve_spec`: the same as the `serve-spec` command."""

from serve_spec.cli import main

raise SystemExit(main())
