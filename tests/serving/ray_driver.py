"""A process of a Ray of two nodes: answers each line of input, a JSON list, with one of JSON.

`["join", ADDRESS, PORT]`  starts Serve with a proxy on each node; `null` when there are two
`["deploy", APPLICATION]`  `null` when Serve has accepted it
`["nodes", DEPLOYMENT]`    the addresses of the nodes of its replicas
"""

import json
import sys

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from tests.e2e.fleet import actors
from tests.serving.cluster import eventually


def join(address, port):
    eventually(lambda: has_joined(address), bool)
    eventually(lambda: len(ray.nodes()), lambda num: num == 2)
    serve.start(
        proxy_location="EveryNode",
        http_options={"host": "0.0.0.0", "port": port},
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )


def has_joined(address):
    try:
        ray.init(address, log_to_driver=False)
    except ConnectionError:
        return False
    return True


def deploy(application):
    schema = ServeDeploySchema.model_validate({"applications": [application]})
    _get_global_client().deploy_apps(schema)


def nodes(deployment):
    return sorted(
        ray.get(actor.__ray_call__.remote(lambda self: ray.util.get_node_ip_address()))
        for actor in actors(deployment).values()
    )


if __name__ == "__main__":
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer = {"join": join, "deploy": deploy, "nodes": nodes}[name](*arguments)
        print(json.dumps(answer), flush=True)
