"""What runs in front of routers: HAProxy, Ray Serve's HTTP proxies, answers of killed processes."""

from serve_spec.serving.proxy.callback import install as install
